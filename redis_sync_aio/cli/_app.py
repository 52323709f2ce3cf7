"""The commands, and the program that they make up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from redis_sync_aio import __version__

from . import _demo, _run
from . import _doctor as doctor
from ._look import ending, looking, top
from ._session import COMMON_EXITS, NAME, command_of

app: typer.Typer = typer.Typer(
    name=NAME,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXITS: dict[str, dict[int, str]] = {}
"""The exit codes of each command, and what they mean."""


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        print(f"redis_sync_aio {__version__}")
        raise typer.Exit


@app.callback()
def cli(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Distributed locks for asyncio on Redis and Valkey: look at them, use them, check the servers they live on."""


def add(name: str, body: Callable[..., Any], exits: Mapping[int, str], otherwise: str = "", **client: Any) -> None:
    """Add a command; its help ends with the exit codes. ``client``: options of the client of its session."""
    EXITS[name] = dict(exits)
    lines = [f"- **{code}** {meaning}" for code, meaning in sorted(exits.items())]
    codes = "\n".join([*lines, *([f"- {otherwise}"] if otherwise else [])])
    app.command(name, epilog=f"Exit codes:\n\n{codes}")(command_of(body, **client))


add("doctor", doctor.doctor, COMMON_EXITS | doctor.EXITS, decode_responses=True)
add("run", _run.run, COMMON_EXITS | _run.EXITS, _run.ENDS)
add("ls", looking.ls, COMMON_EXITS | looking.LS_EXITS)
add("show", looking.show, COMMON_EXITS | looking.SHOW_EXITS)
add("top", top.top, COMMON_EXITS | top.EXITS)
add("watch", looking.watch, COMMON_EXITS | looking.WATCH_EXITS)
add("release", ending.release, COMMON_EXITS | ending.RELEASE_EXITS)
add("forget", ending.forget, COMMON_EXITS | ending.FORGET_EXITS)
add("demo", _demo.demo, _demo.EXITS)
