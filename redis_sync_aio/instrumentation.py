"""Events of locks: for metrics, traces, tests, and logs of your own.

An observer is a function that is called with each event::

    from redis_sync_aio.instrumentation import Event, Lost, observe_all

    def count(event: Event) -> None:
        if isinstance(event, Lost):
            lost[event.pattern, event.reason] += 1

    sync = Coordinator(redis, observe=count)  # the events of this coordinator
    observe_all(count)                        # those of all coordinators of this process, implicit ones as well

**What an observer may do.** It is called in the thread of the event loop, between the steps of the lock, so it delays
them: let it count, append, or put into a queue, and return. It must not block, and is no coroutine function. It may
attach and close observers, and start tasks. An exception that it raises is logged once (``observer_failed``) and
changes nothing; a KeyboardInterrupt, or anything else that is no Exception, is not caught. It should not keep the
events `Withdrawn` forever: they refer to exceptions, and so to frames.

**Requests.** Each acquisition of a lease is a request, with a number of its own: `Requested`, and then exactly one end.
That is `Withdrawn`, or after `Granted` either `Released` or `Lost`. A call that is refused before it becomes a request
(a bad argument, a coordinator that is closed or in another event loop) has no events. An observer that is attached
later gets no events of requests that began before.

- A lock that stands on others (reentrant, multi, Redlock) is one request, whatever happens below: nothing counts twice.
- An acquisition of a reentrant lock by its owner, inside another one, sends no command: it has no events. The request
  ends with the last of these leases.
- The downgrade of a writer changes nothing here: that request stays "write" to its end.
- Tasks that share what their process holds (``share=True``) have a request each. `HandedOver` says that no server was
  asked.
- A waiter of an event, a latch or a barrier holds nothing: `Released` follows `Granted` immediately.
- The events of a Redlock go to the observers of the first of its coordinators.
- A call of a job (`once`, `once_per`) that does not run it is no request, or one of a lock, and then `Skipped`.
- `redis_sync_aio.compat.Lock` has no events: its lock may be released by any process that knows the token.
"""

from __future__ import annotations

from ._core.events import (
    ConnectionLost,
    ConnectionRestored,
    Event,
    Granted,
    HandedOver,
    Lost,
    Released,
    RenewedLate,
    Requested,
    Skipped,
    Stalled,
    Withdrawn,
)
from ._core.observing import Observer, PatternOf, observe_all

__all__ = [
    "ConnectionLost",
    "ConnectionRestored",
    "Event",
    "Granted",
    "HandedOver",
    "Lost",
    "Observer",
    "PatternOf",
    "Released",
    "RenewedLate",
    "Requested",
    "Skipped",
    "Stalled",
    "Withdrawn",
    "observe_all",
]
