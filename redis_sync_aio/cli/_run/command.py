"""The options of `run`, in the words of flock(1)."""

from __future__ import annotations

import json
import os
import shutil
from enum import StrEnum
from typing import Annotated

import typer

from .._session import USAGE, Failure, Session, Shared, execute, not_empty, print_error
from .child import CANNOT_EXECUTE, LOST, NOT_FOUND, Holding, Plan, Side

EXITS = {
    1: "the lock was not granted: -n or --timeout (-E sets another code)",
    LOST: "the lock was lost while COMMAND ran",
    CANNOT_EXECUTE: "COMMAND cannot be executed",
    NOT_FOUND: "COMMAND was not found",
}
ENDS = "else the exit code of COMMAND; 128 and the signal if one ended it"


class WhenLost(StrEnum):
    """The choices for a program whose lock is lost."""

    TERM = "term"
    KILL = "kill"
    IGNORE = "ignore"


def run(
    shared: Shared,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The lock.", callback=not_empty)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", show_default=False,
        help="The program and its arguments.")],
    no_wait: Annotated[bool, typer.Option("--no-wait", "-n", help="Do not wait if the lock is taken.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", "-w", min=0, metavar="S",
        help="Seconds to wait at most. Without it, and without -n: as long as it takes.")] = None,
    conflict_exit_code: Annotated[int, typer.Option("--conflict-exit-code", "-E", min=0, max=255, metavar="CODE",
        help="Exit code if the lock was not granted.")] = 1,
    shared_side: Annotated[bool, typer.Option("--shared", "-s",
        help="Take the read side of a read/write lock.")] = False,
    exclusive: Annotated[bool, typer.Option("--exclusive", "-x",
        help="Take its write side. A lock without -s or -x is another lock.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N",
        help="Take a semaphore with so many permits.")] = None,
    weight: Annotated[int, typer.Option("--weight", min=1, metavar="W", help="Permits of the semaphore to take.")] = 1,
    ttl: Annotated[float, typer.Option("--ttl", min=0.1, metavar="S",
        help="Seconds that the lock lasts if this machine dies; it is renewed.")] = 30.0,
    on_lost: Annotated[WhenLost, typer.Option("--on-lost",
        help="End COMMAND when the lock is lost: by SIGTERM, by SIGKILL, or not.")] = WhenLost.TERM,
    grace: Annotated[float, typer.Option("--grace", min=0, metavar="S",
        help="Seconds between SIGTERM and SIGKILL.")] = 10.0,
) -> None:  # fmt: skip
    """Run COMMAND while holding a lock, a permit, or a side of a read/write lock.

    COMMAND finds the fence, the name and the token in REDIS_SYNC_AIO_FENCE, REDIS_SYNC_AIO_NAME and
    REDIS_SYNC_AIO_TOKEN. With --json one line of JSON about the run is printed on stderr at the end.
    """
    side: Side = "shared" if shared_side else "exclusive" if exclusive else "lock"

    def check() -> None:
        check_options(no_wait, timeout, shared_side + exclusive + (limit is not None), limit, weight)
        check_program(command[0])

    async def body(session: Session) -> int:
        wait = not no_wait and timeout != 0
        plan = Plan(
            name, command, side, limit, weight, ttl, wait, timeout, conflict_exit_code, on_lost.value, grace,
        )  # fmt: skip
        outcome = await Holding(session, plan).run()
        if shared.json:
            print_error(json.dumps(outcome.as_dict()))
        return outcome.exit

    execute(shared, body, check=check)


def check_options(no_wait: bool, timeout: float | None, kinds: int, limit: int | None, weight: int) -> None:
    """Refuse options that exclude each other."""
    if no_wait and timeout is not None:
        raise Failure("-n does not wait and --timeout waits: give one of them", USAGE)
    if kinds > 1:
        raise Failure("--shared, --exclusive and --limit are three kinds of locks: give one of them", USAGE)
    if limit is None and weight != 1:
        raise Failure("--weight needs --limit", USAGE)
    if limit is not None and weight > limit:
        raise Failure(f"--weight {weight} is more than --limit {limit}", USAGE)


def check_program(program: str) -> None:
    """Refuse a program that is not there, before anything is locked for it."""
    if shutil.which(program) is None:
        found = os.sep in program and os.path.exists(program)
        why, code = ("cannot be executed", CANNOT_EXECUTE) if found else ("was not found", NOT_FOUND)
        raise Failure(f"{program!r} {why}; nothing was locked", code)
