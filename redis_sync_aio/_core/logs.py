"""Every line that this package logs, worded in one place.

The logger is "redis_sync_aio". Each record says which line it is by its attribute ``event``; the facts in the message
are attributes as well (``record.lock``, ``record.fence`` …), for handlers that write JSON.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import LeaseLost
from .keys import SlotState

if TYPE_CHECKING:
    from .observers import Observation

logger = logging.getLogger("redis_sync_aio")


def _log(level: int, event: str, message: str, error: BaseException | None = None, **facts: object) -> None:
    with _harmless():
        logger.log(level, message, facts, extra={"event": event, **facts}, exc_info=error, stacklevel=3)


def _warn(event: str, message: str, **facts: object) -> None:
    with _harmless():
        logger.warning(message, facts, extra={"event": event, **facts}, stacklevel=3)


@contextmanager
def _harmless() -> Iterator[None]:
    """Print what a filter or record factory of the application raises, as logging does for handlers.

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


# -- leases ------------------------------------------------------------------------------------------------


def _request(observed: Observation | None) -> int | None:
    return None if observed is None else observed.request


def lease_lost(loss: LeaseLost, observed: Observation | None, tasks: int = 1) -> None:
    """Log a lease that was lost, with the request that is ``observed``; ``tasks``: how many had it.

    That this process closed its own coordinator is no warning: it is how most programs end.
    """
    _log(
        logging.INFO if loss.reason == "closed" else logging.WARNING,
        "lease_lost",
        "%(loss)s",
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
    """Log a lease that nobody has any more; return what was said."""
    message = (
        f"the lease on {lock!r} (fence {fence}) was forgotten: the task that acquired it has ended, and nothing is "
        f"left that could release it. It is no longer renewed and ends within {ttl:g} seconds. Use `async with`, or "
        "release it"
    )
    _warn("lease_forgotten", "%(what)s", what=message, lock=lock, fence=fence)
    return message


def renewal_late(
    lock: str, late: float, left: float, period: float, claim: float, observed: Observation | None
) -> None:
    """Log a renewal that the event loop sent late, and that came in time all the same. ``claim``: as `LeaseLost`."""
    advice = "raise Coordinator(claim=): it was just handed over" if claim else "give the lock a longer ttl"
    _warn(
        "renewal_late",
        "the renewal of the lease on %(lock)r came %(lateness).2f seconds late: the event loop was blocked; %(left).2f "
        "of %(period).2f seconds are left. Move blocking work to a thread, or " + advice,
        lock=lock,
        lateness=late,
        left=left,
        period=period,
        claim=claim,
        request=_request(observed),
    )


def renewal_refused(lock: str, error: Exception, left: float) -> None:
    """Log a renewal that the server refused."""
    _warn(
        "renewal_refused",
        "the lease on %(lock)r could not be renewed; it ends in %(left).2f seconds unless that changes: %(error)s",
        lock=lock,
        error=error,
        left=left,
    )


def coordinator_dropped(coordinator: str) -> str:
    """Log a coordinator that was forgotten; return what was said."""
    message = f"{coordinator} was dropped without aclose(): use `async with`, or await its aclose()"
    _warn("coordinator_dropped", "redis_sync_aio: %(what)s", what=message, coordinator=coordinator)
    return message


def waiting_long(lock: str, seconds: float, holder: str, waiting: int, itself: bool) -> None:
    """Log a wait that takes long; ``itself``: the task that holds it is one of those that wait."""
    advice = "A task that holds it waits for it as well: it waits for itself. " if itself else ""
    _warn(
        "waiting_long",
        "a task has waited for %(lock)r for %(seconds).0f seconds: %(holder)s; %(waiting)d waiting. %(advice)s"
        "Look at statistics(), or wait with a timeout",
        lock=lock,
        seconds=seconds,
        holder=holder,
        waiting=waiting,
        itself=itself,
        advice=advice,
    )


def fence_ahead(lock: str, server: int, servers: int, seconds: float) -> None:
    """Log a server of a Redlock whose clock is far ahead; ``server``: counted from 1."""
    _warn(
        "fence_ahead",
        "server no. %(server)d of %(servers)d of the Redlock %(lock)r grants fences that are %(seconds).0f seconds "
        "ahead of those of a majority: set its clock. Until its fences are near theirs again one server fewer may fail",
        lock=lock,
        server=server,
        servers=servers,
        seconds=seconds,
    )


def not_owned_at_exit(lock: str) -> None:
    """Log, in the words of redis-py, that a lock was lost before the end of its body."""
    _warn("not_owned_at_exit", "Lock was unlocked or no longer owned when exiting context manager.", lock=lock)


# -- elections ---------------------------------------------------------------------------------------------


def stands_again(election: str, delay: float, error: Exception) -> None:
    """Log why a process that runs for an election does not lead, and will stand again."""
    message = "this process does not lead in %(lock)r, and stands again in %(delay).2f seconds: %(kind)s: %(why)s"
    _warn("stands_again", message, lock=election, delay=delay, kind=type(error).__name__, why=error)


# -- jobs --------------------------------------------------------------------------------------------------

SKIPPED = {
    "done": "it has been done",
    "running": "it is running elsewhere",
    "failed": "an earlier run began, and raised, was cancelled or was killed. Find out what it did; "
    "Coordinator.forget() lets the job run again",
}
"""The reason that a job does not run, by the state of its slot."""


def job_skipped(job: str, state: SlotState) -> None:
    """Log a call of a job that returns None without running it; a warning if an earlier run has failed."""
    _log(
        logging.WARNING if state == "failed" else logging.INFO,
        "job_skipped",
        "this call does not run the job %(lock)r: %(why)s",
        lock=job,
        state=state,
        why=SKIPPED[state],
    )


# -- connections -------------------------------------------------------------------------------------------


def connection_dropped(server: str, why: str) -> None:
    """Log a connection that this process gives up, to open another one."""
    message = "redis_sync_aio drops its connection to %(server)s: %(why)s"
    _log(logging.INFO, "connection_dropped", message, server=server, why=why)


def connection_lost(server: str, seconds: float, why: str) -> None:
    """Log that there has been no connection for a while."""
    _warn(
        "connection_lost",
        "redis_sync_aio has had no connection to %(server)s for %(seconds).1f seconds: %(why)s. It tries again "
        "until the server is back; leases that cannot be renewed meanwhile end with their ttl",
        server=server,
        seconds=seconds,
        why=why,
    )


def connecting_failed(server: str, error: BaseException) -> None:
    """Log what the caller's client raised while it connected."""
    message = (
        "redis_sync_aio has no answer from %(server)s: the client raised %(why)s. Look at what it calls while it "
        "connects (a credential provider, say). It tries again while that is needed"
    )
    why = f"{type(error).__name__}: {error}".rstrip(": .")
    _log(logging.WARNING, "connecting_failed", message, error, server=server, why=why)


def connection_restored(server: str, after: float) -> None:
    """Log the end of what `connection_lost` said."""
    _warn(
        "connection_restored",
        "redis_sync_aio is connected to %(server)s again after %(after).1f seconds",
        server=server,
        after=after,
    )


def read_only(server: str, why: str) -> None:
    """Log that a server takes no writes."""
    _warn(
        "read_only",
        "%(server)s is a read-only replica: %(why)s. redis_sync_aio connects again until a primary answers; if this "
        "goes on, check where the client connects to",
        server=server,
        why=why,
    )


def polling_instead(why: Exception) -> None:
    """Log that wake-ups are not pushed."""
    message = 'redis_sync_aio polls instead of being woken (push="never" silences this): %(why)s'
    _warn("polling_instead", message, why=why)


def watch_instead(why: str) -> None:
    """Log that scripts are refused."""
    message = 'redis_sync_aio uses WATCH instead of scripts (engine="watch" silences this): %(why)s'
    _warn("watch_instead", message, why=why)


def slots_unknown(error: BaseException, expected: bool) -> None:
    """Log that the nodes of a cluster do not say where its slots are; ``expected``: as happens in an outage."""
    message = "redis_sync_aio does not learn where the slots are: %(why)r"
    _log(logging.INFO if expected else logging.WARNING, "slots_unknown", message, why=error)


def stray_message(payload: bytes) -> None:
    """Log a message in the inbox that is not one of this package."""
    message = "redis_sync_aio ignored a message in its inbox that has another format: %(payload)r"
    _warn("stray_message", message, payload=payload[:100])


def useless_message(payload: bytes) -> None:
    """Log the exception of now, which a message in the inbox led to."""
    message = "redis_sync_aio could not make use of a message in its inbox: %(payload)r"
    _log(logging.ERROR, "useless_message", message, sys.exception(), payload=payload[:100])


def useless_answer(name: str, error: BaseException) -> None:
    """Log an answer of the server that nobody understands."""
    _log(
        logging.ERROR, "useless_answer", "redis_sync_aio cannot make use of an answer about %(lock)r", error, lock=name
    )


def outcome_not_taken(name: str) -> None:
    """Log the exception of now, a defect: the sender of a command did not take its outcome."""
    message = "redis_sync_aio: a defect: the end of a command about %(lock)r was not taken"
    _log(logging.ERROR, "outcome_not_taken", message, sys.exception(), lock=name)


# -- observers ---------------------------------------------------------------------------------------------


def observer_failed(observer: str, error: BaseException) -> None:
    """Log what an observer raised, the first time."""
    message = (
        "the observer %(observer)s raised an error. It is called again, and what else it raises is not logged: an "
        "observer must not raise"
    )
    _log(logging.ERROR, "observer_failed", message, error, observer=observer)


# -- requests of web frameworks ----------------------------------------------------------------------------


def request_not_served(method: str, path: str, *errors: Exception) -> None:
    """Log why a request was answered with 503, which the answer does not say. ``errors``: those of its tasks."""
    message = "%(method)s %(path)s: %(kind)s: %(why)s"
    why = "; ".join(dict.fromkeys(map(str, errors)))
    _warn("request_not_served", message, method=method, path=path, kind=type(errors[0]).__name__, why=why)


def lease_ends_early(method: str, path: str, name: str, dependency: str) -> None:
    """Log an endpoint whose lease ends before another dependency of it."""
    message = (
        "%(method)s %(path)s: the lease on %(lock)r ends before the dependency %(dependency)s, so it does not protect "
        "what that writes after its yield. Put it after the lease, with Depends(%(dependency)s, scope='function'). If "
        "it writes nothing there, say so: lifespan_of(..., may_outlive=[%(dependency)s])"
    )
    _warn("lease_ends_early", message, method=method, path=path, lock=name, dependency=dependency)


# -- jobs --------------------------------------------------------------------------------------------------


def result_not_kept(name: str, mark: str, error: BaseException) -> None:
    """Log why the result of a run cannot be given to later calls with its name."""
    message = "the run for %(lock)r ended, but its result was not kept (%(mark)s): %(kind)s: %(why)s"
    _warn("result_not_kept", message, lock=name, mark=mark, kind=type(error).__name__, why=error)


# -- undo steps --------------------------------------------------------------------------------------------


def undo_failed(error: BaseException, message: str) -> None:
    """Log undo steps that raised."""
    _log(logging.ERROR, "undo_failed", "%(what)s", error, what=message)


def undo_ended_late(error: BaseException, step: str) -> None:
    """Log an undo step that raised after nobody waited for it any more."""
    _log(logging.ERROR, "undo_ended_late", "%(step)s raised after its time was over", error, step=step)
