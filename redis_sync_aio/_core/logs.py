"""Every line that this package logs, worded in one place.

The logger is "redis_sync_aio". Each record says which line it is by its attribute ``event``; the facts in the message
are attributes as well (``record.lock``, ``record.fence`` …), for handlers that write JSON.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import LeaseLost
from .keys import SlotState

if TYPE_CHECKING:
    from .observers import Observation

logger = logging.getLogger("redis_sync_aio")


@contextmanager
def _harmless() -> Iterator[None]:
    """Print errors of a filter or record factory of the application, as logging does for handlers.

    It would end the connection, or the renewals, that had something to say.
    """
    try:
        yield
    except BaseException as error:
        if logging.raiseExceptions:
            with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
                traceback.print_exc()
        raise_later(error)


def raise_later(error: BaseException, of_task: bool = False) -> None:
    """Raise an error of the application's code, unless it is an Exception, in a callback of its own.

    Where that code was called, our state has to move on. asyncio ends the loop for SystemExit and KeyboardInterrupt
    (and has done so if they ended a task, ``of_task``), and gives everything else, such as what `pytest.fail` raises,
    to the exception handler of the loop.
    """
    if not isinstance(error, Exception) and not (of_task and isinstance(error, (SystemExit, KeyboardInterrupt))):
        with suppress(RuntimeError):  # no loop runs here
            asyncio.get_running_loop().call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error


# -- the table of lines --------------------------------------------------------------------------------------

INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR
LINES: dict[str, tuple[int, str]] = {
    # leases
    "lease_lost": (WARNING, "%(loss)s"),
    "lease_forgotten": (WARNING, "%(what)s"),
    "renewal_late": (
        WARNING,
        "the renewal of the lease on %(lock)r came %(lateness).2f seconds late: the event loop was blocked; %(left).2f "
        "of %(period).2f seconds are left. Move blocking work to a thread, or %(advice)s",
    ),
    "renewal_refused": (
        WARNING,
        "the lease on %(lock)r could not be renewed; it ends in %(left).2f seconds unless that changes: %(error)s",
    ),
    "waiting_long": (
        WARNING,
        "a task has waited for %(lock)r for %(seconds).0f seconds: %(holder)s; %(waiting)d waiting. %(advice)s"
        "Look at statistics(), or wait with a timeout",
    ),
    "fence_ahead": (
        WARNING,
        "server no. %(server)d of %(servers)d of the Redlock %(lock)r grants fences that are %(seconds).0f seconds "
        "ahead of those of a majority: set its clock. Until its fences are near theirs again one server fewer may fail",
    ),
    "not_owned_at_exit": (WARNING, "Lock was unlocked or no longer owned when exiting context manager."),
    # elections and jobs
    "stands_again": (
        WARNING,
        "this process does not lead in %(lock)r, and stands again in %(delay).2f seconds: %(kind)s: %(why)s",
    ),
    "job_skipped": (INFO, "this call does not run the job %(lock)r: %(why)s"),
    "result_not_kept": (
        WARNING,
        "the run for %(lock)r ended, but its result was not kept (%(mark)s): %(kind)s: %(why)s",
    ),
    # connections
    "coordinator_dropped": (WARNING, "redis_sync_aio: %(what)s"),
    "connection_dropped": (INFO, "redis_sync_aio drops its connection to %(server)s: %(why)s"),
    "connection_lost": (
        WARNING,
        "redis_sync_aio has had no connection to %(server)s for %(seconds).1f seconds: %(why)s. It tries again "
        "until the server is back; leases that cannot be renewed meanwhile end with their ttl",
    ),
    "connecting_failed": (
        WARNING,
        "redis_sync_aio has no answer from %(server)s: the client raised %(why)s. Look at what it calls while it "
        "connects (a credential provider, say). It tries again as long as a lock needs it",
    ),
    "connection_restored": (
        WARNING,
        "redis_sync_aio is connected to %(server)s again after %(after).1f seconds",
    ),
    "read_only": (
        WARNING,
        "%(server)s is a read-only replica: %(why)s. redis_sync_aio connects again until a primary answers; if this "
        "continues, check where the client connects to",
    ),
    "polling_instead": (
        WARNING,
        'redis_sync_aio polls instead of being woken (push="never" silences this): %(why)s',
    ),
    "watch_instead": (
        WARNING,
        'redis_sync_aio uses WATCH instead of scripts (engine="watch" silences this): %(why)s',
    ),
    "later_layout": (WARNING, "a client of a later version of redis_sync_aio waits for %(lock)r: update this process"),
    "slots_unknown": (WARNING, "redis_sync_aio cannot find out which shard has which slots: %(why)r"),
    "stray_message": (WARNING, "redis_sync_aio ignored a message in its inbox that has another format: %(payload)r"),
    "useless_message": (ERROR, "redis_sync_aio cannot decode a message in its inbox: %(payload)r"),
    "useless_answer": (ERROR, "redis_sync_aio cannot decode a reply about %(lock)r"),
    "outcome_not_taken": (ERROR, "redis_sync_aio: a bug: the reply to a command for %(lock)r was not used"),
    # code of the application
    "observer_failed": (
        ERROR,
        "the observer %(observer)s raised an error. It is called again, and what else it raises is not logged: an "
        "observer must not raise",
    ),
    "request_not_served": (WARNING, "%(method)s %(path)s: %(kind)s: %(why)s"),
    "lease_ends_early": (
        WARNING,
        "%(method)s %(path)s: the lease on %(lock)r ends before the dependency %(dependency)s, so it does not protect "
        "what that writes after its yield. Put it after the lease, with Depends(%(dependency)s, scope='function'). If "
        "it writes nothing there, say so: lifespan_of(..., may_outlive=[%(dependency)s])",
    ),
    "undo_failed": (ERROR, "%(what)s"),
    "undo_ended_late": (ERROR, "%(step)s raised after its timeout"),
}
"""The level and the message of every line, by its ``event``."""


def log(
    event: str, /, *, level: int | None = None, raised: BaseException | None = None, depth: int = 2, **facts: object
) -> None:
    """Log a line of the table with its facts.

    ``raised`` adds a traceback; ``depth`` is the stack level of the caller that the record names.
    """
    usual, message = LINES[event]
    with _harmless():
        logger.log(level or usual, message, facts, extra={"event": event, **facts}, exc_info=raised, stacklevel=depth)


# -- lines whose facts are worked out -------------------------------------------------------------------------


def _request(observed: Observation | None) -> int | None:
    return None if observed is None else observed.request


def lease_lost(loss: LeaseLost, observed: Observation | None, tasks: int = 1) -> None:
    """Log a lease that was lost, with the request that is ``observed``; ``tasks``: how many had it.

    That this process closed its own coordinator is no warning: it is how most programs end.
    """
    log(
        "lease_lost",
        level=INFO if loss.reason == "closed" else WARNING,
        depth=3,
        loss=str(loss),
        lock=loss.name,
        reason=loss.reason,
        fence=loss.fence,
        held=loss.held_for,
        stalled=loss.stalled,
        time_is_up=loss.time_is_up,
        claim=loss.claim,
        tasks=tasks,
        request=_request(observed),
    )


def lease_forgotten(lock: str, fence: int, ttl: float) -> str:
    """Log a forgotten lease; return the message."""
    message = (
        f"the lease on {lock!r} (fence {fence}) was forgotten: the task that acquired it has ended, and nothing is "
        f"left that could release it. It is no longer renewed and ends within {ttl:g} seconds. Use `async with`, or "
        "release it"
    )
    log("lease_forgotten", depth=3, what=message, lock=lock, fence=fence)
    return message


def renewal_late(
    lock: str, late: float, left: float, period: float, claim: float, observed: Observation | None
) -> None:
    """Log a renewal that the event loop sent late, and that came in time all the same. ``claim``: as `LeaseLost`."""
    log(
        "renewal_late",
        depth=3,
        lock=lock,
        lateness=late,
        left=left,
        period=period,
        claim=claim,
        request=_request(observed),
        advice="raise Coordinator(claim=): it was just handed over" if claim else "give the lock a longer ttl",
    )


def coordinator_dropped(coordinator: str) -> str:
    """Log a forgotten coordinator; return the message."""
    message = f"{coordinator} was dropped without aclose(): use `async with`, or await its aclose()"
    log("coordinator_dropped", depth=3, what=message, coordinator=coordinator)
    return message


SKIPPED = {
    "done": "it has been done",
    "running": "it is running elsewhere",
    "failed": "an earlier run raised, was cancelled or was killed. Find out what it did; "
    "Coordinator.forget() lets the job run again",
}
"""The reason that a job does not run, by the state of its slot."""


def job_skipped(job: str, state: SlotState) -> None:
    """Log a call of a job that returns None without running it; a warning if an earlier run has failed."""
    log(
        "job_skipped",
        level=WARNING if state == "failed" else INFO,
        depth=3,
        lock=job,
        state=state,
        why=SKIPPED[state],
    )


def connecting_failed(server: str, error: BaseException) -> None:
    """Log the error that the caller's client raised while it connected."""
    why = f"{type(error).__name__}: {error}".rstrip(": .")
    log("connecting_failed", raised=error, depth=3, server=server, why=why)


def request_not_served(method: str, path: str, *errors: Exception) -> None:
    """Log why a request was answered with 503, which the answer does not say. ``errors``: those of its tasks."""
    why = "; ".join(dict.fromkeys(map(str, errors)))
    log("request_not_served", depth=3, method=method, path=path, kind=type(errors[0]).__name__, why=why)


def result_not_kept(name: str, mark: str, error: BaseException) -> None:
    """Log why the result of a run cannot be given to later calls with its name."""
    log("result_not_kept", depth=3, lock=name, mark=mark, kind=type(error).__name__, why=error)
