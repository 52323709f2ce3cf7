"""The commands that end something from outside, with a question first: ``release`` and ``forget``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from redis_sync_aio import AsyncLock, AsyncReadWriteLock, AsyncSemaphore, Coordinator, NotHeld
from redis_sync_aio._core.display import bytes_of
from redis_sync_aio._core.keys import NEVER_HELD, Kind
from redis_sync_aio.inspection import HolderView, NameView, escape, inspect
from redis_sync_aio.jobs import forget as forget_mark
from redis_sync_aio.jobs import slot_name
from redis_sync_aio.types import ReadSide

from .._session import DENIED, INTERRUPTED, USAGE, Failure, Session
from . import render
from .looking import Name

NOTHING = 1
RELEASE_EXITS = {
    0: "it was released",
    1: "nothing was changed: no matching holder, or you declined",
    2: "nothing was changed: no terminal to prompt on (pass --yes), several hold it (choose one), or wrong usage",
}
FORGET_EXITS = {
    0: "it was forgotten",
    NOTHING: "nothing was changed: nothing is known of it, or you declined",
    USAGE: "nothing was changed: no terminal to prompt on (pass --yes), or wrong usage",
}
MOST = 10_000
"""Holders of one name that are looked through."""


class Choices(StrEnum):
    """The kinds of names that have holders."""

    LOCK = "lock"
    SEMAPHORE = "semaphore"
    READ_WRITE = "read_write"


@dataclass(frozen=True, slots=True)
class Choice:
    """The options that say which holders are meant."""

    token: Annotated[str | None, typer.Option(metavar="T", help="Only the lease of this token or identity.")] = None
    host: Annotated[str | None, typer.Option(metavar="H", help="Only leases of this machine.")] = None
    pid: Annotated[int | None, typer.Option(metavar="P", help="Only of this process; with --host.")] = None
    force: Annotated[
        bool,
        typer.Option("--force", help="End the lease of any holder, also of another program, without comparing it."),
    ] = False

    def __post_init__(self) -> None:
        if (self.token is not None) + (self.host is not None) + self.force > 1:
            raise Failure("use one of --token, --host and --force", USAGE)
        if self.pid is not None and self.host is None:
            raise Failure("--pid needs --host: numbers of processes are those of one machine", USAGE)

    def means(self, holder: HolderView) -> bool:
        """Return whether this holder is meant."""
        if self.token is not None:
            return self.token in (holder.token, render.plain(holder.token))  # the latter is what `show` prints
        if self.host is not None:
            return holder.host == self.host and self.pid in (None, holder.pid)
        return True

    @property
    def named(self) -> bool:
        """True if any holder is named, or all are meant."""
        return self.token is not None or self.host is not None or self.force


async def release(
    session: Session,
    name: Name,
    choice: Choice,
    kind: Annotated[
        Choices | None, typer.Option(metavar="KIND", help="lock, semaphore or read_write, if several have the name.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Release the lease of a name, and hand it to the next waiter.

    Says what will happen and asks first. The lease is compared and ended in one step on the server: if another client
    holds it by then, nothing is changed (except with --force). Fences keep rising.
    """
    found = await inspect(session.client, escape(name), shown=MOST, prefix=session.prefix)
    asked = [it for it in found if kind in (None, it.kind, "lock" if it.kind == "robust" else it.kind)]
    views = [it for it in asked if it.holders and it.kind not in NEVER_HELD]
    if not views:
        for refused in (one for it in asked for one in it.problems if one.code == "unreadable"):
            raise Failure(f"{render.plain(name)!r} is not readable: {render.plain(refused.meaning)}", DENIED)
        as_what = "" if kind is None else f" as a {'read/write lock' if kind == 'read_write' else kind}"
        return report(session, name, "released", [], f"{render.plain(name)!r} has no holder{as_what}")
    if len(views) > 1:
        kinds = ", ".join(it.kind for it in views)
        raise Failure(f"several have the name {render.plain(name)!r}: choose one of them by --kind ({kinds})", USAGE)
    (view,) = views
    meant = [it for it in view.holders if choice.means(it)]
    if not meant:
        return report(session, name, "released", [], f"{held_by(view)} it, not the one that you named")
    if not choice.named and (len(view.holders) > 1 or meant[0].foreign):
        how = "--token or --force" if meant[0].foreign else "--token, --host or --force"
        raise Failure(f"{held_by(view)} it: choose by {how}", USAGE)
    if not choice.force and not all(it.token for it in meant):
        raise Failure("the value of its key is empty, and so is no token: use --force", USAGE)
    if not yes:
        await ask(session, "\n".join(announced(view, meant)))
    ended = await end(session, view, meant, choice.force)
    if not ended:
        return report(session, name, "released", [], "nothing was changed: that lease has ended meanwhile")
    count = f" {len(ended)} of {len(meant)} leases" if len(meant) > 1 else ""
    said = f"released{count}: {', '.join(map(render.lease, ended))}"
    return report(session, name, "released", [it.token for it in ended], said)


def held_by(view: NameView) -> str:
    """Return "worker-3:7 holds", or "worker-3:7 +1 hold" for several holders."""
    return f"{render.holders(view)} {'holds' if len(view.holders) == 1 else 'hold'}"


async def ask(session: Session, what: str, question: str = "Release it?") -> None:
    """Describe the action, and end the command unless the answer to ``question`` is yes."""
    if session.output.as_json or not sys.stdin.isatty():
        raise Failure("no terminal to prompt on: pass --yes to confirm", USAGE)
    typer.echo(what, err=True)
    try:
        answer = await answered(f"{question} [y/N]: ")
    except (EOFError, asyncio.CancelledError):  # Ctrl-D, Ctrl-C
        typer.echo(err=True)
        raise Failure("nothing was changed", INTERRUPTED) from None
    if not answer:
        raise Failure("nothing was changed", NOTHING)


async def answered(question: str) -> bool:
    """Ask until the answer is yes or no, which is what an empty line means; raise EOFError for the end of the input.

    The event loop waits for the line. ``input()`` would miss a Ctrl-C that comes between its prompt and its read.
    """
    answers = {"y": True, "yes": True, "n": False, "no": False, "": False}
    loop, line = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, line.set)
    try:
        while True:
            typer.echo(question, nl=False, err=True)
            await line.wait()
            line.clear()
            if not (answer := sys.stdin.readline()):
                raise EOFError
            if (said := answer.strip().lower()) in answers:
                return answers[said]
            typer.echo("Error: the answer is y or n", err=True)
    finally:
        loop.remove_reader(sys.stdin)


def announced(view: NameView, meant: Sequence[HolderView]) -> list[str]:
    """Return the effects of the release, in sentences."""
    lines = [f"{render.plain(view.name)} ({view.kind}) at {view.server}"]
    for it in meant:
        since = f" after {render.seconds(it.held_for)}" if it.held_for is not None else ""
        lines.append(f"- {render.party(it)} loses it{since} (token {render.plain(it.token)}).")
    if any(it.foreign for it in meant):
        lines.append("- Another program wrote that value. It is deleted, and that program does not notice.")
    if any(not it.foreign and it.connected is not False for it in meant):
        lines.append(
            "- A process that still runs finds out when it next renews, and its work is cancelled. Until then both may "
            "be working; the next holder has a higher fence."
        )
    living = [it for it in view.waiters if it.alive is not False]
    when = "immediately" if view.limit == 1 else "as soon as enough is free"
    if view.limit == 0:
        when = "when a resize raises the limit, which is 0 (paused)"
    if living:
        more = f" {len(living)} wait in all." if len(living) > 1 else ""
        lines.append(f"- The next waiter gets it {when}: {render.party(living[0])}.{more}")
    elif render.unreadable(view):
        lines.append(f"- The next waiter, if there is one, gets it {when}.")
    else:
        lines.append("- No request waits for it, so it will be free.")
    return lines


async def end(session: Session, view: NameView, meant: Sequence[HolderView], force: bool) -> list[HolderView]:
    """End the leases; return those that were held until now."""
    ended = []
    async with Coordinator(session.client, prefix=session.prefix, push="never") as sync:
        if force and view.kind in ("lock", "robust"):
            return list(meant) if await AsyncLock(sync, view.name).force_release() else []
        lock = _primitive(sync, view.kind, view.name)
        for it in meant:
            for token in dict.fromkeys((it.token.encode(), bytes_of(it.token))):
                with suppress(NotHeld):
                    await lock.release(identity=token)
                    ended.append(it)
                    break
    return ended


def _primitive(sync: Coordinator, kind: Kind, name: str) -> AsyncLock | AsyncSemaphore | ReadSide:
    if kind == "semaphore":
        return AsyncSemaphore(sync, name, limit=None)
    if kind == "read_write":
        return AsyncReadWriteLock(sync, name).read()  # an identity has one permit, on either side
    return AsyncLock(sync, name)  # also of a robust lock: its record stays, for the next holder to take over


def report(session: Session, name: str, what: str, ended: object, said: str) -> int:
    """Print the result, and in JSON the leases that were ended; return the exit code."""
    session.output.show(
        {"name": name, what: ended, "message": said},
        lambda console: console.print(said, markup=False, soft_wrap=True),
    )
    return 0 if ended else NOTHING


async def forget(
    session: Session,
    name: Name,
    slot: Annotated[str, typer.Option(metavar="S", help="The slot, if it is not part of NAME.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Forget the run of a job or a request, so that its next call runs.

    NAME is a name of `once` or `once_per`, or a key of `idempotent`; ls --all lists them. Says what will happen and
    asks first. A run that is in progress is not ended, and is remembered when it ends.
    """
    name = slot_name(name, slot)
    found = await inspect(session.client, escape(name), shown=1, idle=True, prefix=session.prefix)
    mark = next((view.mark for view in found if view.mark is not None), None)
    if mark is None:
        return report(session, name, "forgotten", None, f"nothing is known of a job {render.plain(name)!r}")
    if not yes:
        await ask(session, f"The job {render.plain(name)!r} is {render.mark(mark)}. Its next call runs.", "Forget it?")
    async with Coordinator(session.client, prefix=session.prefix, push="never") as sync:
        if not await forget_mark(sync, name):
            return report(session, name, "forgotten", None, "nothing was changed: it is not remembered any more")
    said = f"forgotten: {render.plain(name)!r} was {render.mark(mark)}"
    return report(session, name, "forgotten", mark.state or "unknown", said)
