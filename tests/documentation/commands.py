"""The options and exit codes of the program, for its page: ``python -m tests.documentation.commands``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer

from redis_sync_aio.cli._app import EXITS, app
from redis_sync_aio.cli._session import COMMON_EXITS

WRITTEN: Final = Path(__file__).parents[2] / "docs" / "assets" / "commands.txt"
GROUP: Final[Any] = typer.main.get_command(app)
ALONE: Final = "demo"
"""The command without the common options and exit codes."""


def reference() -> str:
    """Return the tables of all commands, those of what they have in common first."""
    common = {one.name for one in GROUP.commands["ls"].params if one.rich_help_panel}
    shared = [one for one in GROUP.commands["ls"].params if one.name in common]
    parts = [f"**Every command but `{ALONE}`**", *_tables(shared, COMMON_EXITS)]
    for name, command in GROUP.commands.items():
        alone = name == ALONE
        own = [one for one in command.params if alone or one.name not in common]
        exits = EXITS[name].items() if alone else EXITS[name].items() - COMMON_EXITS.items()
        parts += [f"**`{name}`**", *_tables(own, dict(exits))]
    return "\n\n".join(parts) + "\n"


def _tables(params: Iterable[Any], exits: Mapping[int, str]) -> Iterator[str]:
    if rows := [row for one in params for row in _row(one)]:
        yield "\n".join(["| Option | Meaning |", "|---|---|", *rows])
    if exits:
        codes = [f"| `{code}` | {meaning} |" for code, meaning in sorted(exits.items())]
        yield "\n".join(["| Exit code | Meaning |", "|---|---|", *codes])


def _row(one: Any) -> Iterator[str]:
    """Yield the row of a parameter that is an option, with its default."""
    if one.param_type_name != "option":
        return
    spelled = ", ".join(f"`{option}`" for option in (*one.opts, *one.secondary_opts))
    value = getattr(one.default, "value", one.default)
    shown = one.show_default and value and not isinstance(value, bool)
    default = f" Default: {value:g}" if isinstance(value, int | float) else f" Default: {value}"
    yield f"| {spelled}{f' {one.metavar}' if one.metavar else ''} | {one.help}{default if shown else ''} |"


if __name__ == "__main__":
    WRITTEN.write_text(reference(), "utf-8")
