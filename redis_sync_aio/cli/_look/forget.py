"""``forget``: let a job, or a request, run again."""

from __future__ import annotations

from typing import Annotated

import typer

from redis_sync_aio import Coordinator
from redis_sync_aio.inspection import MarkView, escape, inspect
from redis_sync_aio.jobs import forget as forget_mark
from redis_sync_aio.jobs import slot_name

from .._session import USAGE, Session, Shared, execute
from . import words
from .release import NOTHING, ask
from .show import Name

EXITS = {
    0: "it was forgotten",
    NOTHING: "nothing was changed: nothing is known of it, or the answer was no",
    USAGE: "nothing was changed: nobody can be asked (add --yes), or wrong usage",
}


def forget(
    shared: Shared,
    name: Name,
    slot: Annotated[str, typer.Option(metavar="S", help="The slot, if it is not part of NAME.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget what became of a job or a request, so that its next call runs.

    NAME is a name of `once` or `once_per`, or a key of `idempotent`; ls --all lists them. Says what will happen and
    asks first. A run that is in progress is not ended, and is remembered when it ends.
    """
    execute(shared, lambda session: forget_name(session, slot_name(name, slot), yes))


async def forget_name(session: Session, name: str, yes: bool) -> int:
    """Find the mark, ask, and delete it."""
    found = await inspect(session.client, escape(name), shown=1, idle=True, prefix=session.prefix)
    mark = next((view.mark for view in found if view.mark is not None), None)
    if mark is None:
        return _report(session, name, None, f"nothing is known of a job {words.plain(name)!r}")
    if not yes:
        await ask(session, f"The job {words.plain(name)!r} is {words.mark(mark)}. Its next call runs.", "Forget it?")
    async with Coordinator(session.client, prefix=session.prefix, push="never") as sync:
        if not await forget_mark(sync, name):
            return _report(session, name, None, "nothing was changed: it is not remembered any more")
    return _report(session, name, mark, f"forgotten: {words.plain(name)!r} was {words.mark(mark)}")


def _report(session: Session, name: str, forgotten: MarkView | None, said: str) -> int:
    """Print what was done; return the exit code."""
    value = {"name": name, "forgotten": None if forgotten is None else forgotten.state or "unknown", "message": said}
    session.output.show(value, lambda console: console.print(said, markup=False, soft_wrap=True))
    return NOTHING if forgotten is None else 0
