"""Requests of primitives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .._client.resp import Argument
from .._engine.replies import Answer
from .._leases.grant import Grant
from .._scripts.constants import WRITER_WEIGHT, Outcome
from ..errors import QueueFull, SyncError


def refused_if_full(
    answer: Answer, weight: int, *, name: str, most: int, otherwise: Callable[[Answer, int], SyncError]
) -> SyncError:
    """Return the error for a request with a ``max_waiting``; ``otherwise`` makes that for another refusal."""
    if answer.outcome is not Outcome.QUEUE_FULL:
        return otherwise(answer, weight)
    return QueueFull(name=name, waiting=answer.number, max_waiting=most, remaining=answer.left)


def never_refused(answer: Answer, weight: int) -> SyncError:
    """Raise AssertionError: the server always admits locks, readers and writers."""
    raise AssertionError(f"a request of weight {weight} cannot be refused: {answer}")


@dataclass(slots=True)
class Request:
    """A request of a primitive to the server."""

    ttl_ms: int
    auto_renew: bool
    max_hold: float | None = None
    identity: bytes | None = None
    token: bytes | None = None  # the caller's own; not to be shared as an identity is
    wait: bool = True
    timeout: float | None = None
    weight: int = 0  # the weight of permits; 0 for a lock
    limit: int = 0  # the limit of the permits that the caller knows; 0: the server's
    whose_limit: bytes = b""  # which limit counts if the server knows another: see include/permit_choose_limit.lua
    shared: bool = False  # whether tasks of this process may hold it one after the other, behind one ticket
    grant_type: type[Grant] = Grant
    linger: float = 0.0  # seconds for which a shared lease is kept without a task
    max_waiting: int | None = None  # behind so many others it waits at most; None: any number
    look_every: float = math.inf  # seconds between two looks while it waits; `poll_cap` if that is less
    label: bytes = b""  # the beginning of a token that is made for it: see `Maker.label`
    refused: Callable[[Answer, int], SyncError] = never_refused  # makes the error for an outcome from MISMATCH on

    reusable: bool = field(init=False)
    """Whether what the token holds may be in use elsewhere, before or after this request."""
    more: tuple[Argument, ...] = field(init=False)
    """Its last arguments: weight and limit of permits; for a lock, whether the token may be used again."""
    first: tuple[Argument, ...] = field(init=False)
    """The same until it has a place in the queue: also behind how many others it waits."""
    plain: bool = field(init=False)
    """Whether its lease is renewed without limit, and weighs nothing or one."""

    def __post_init__(self) -> None:
        self.reusable = self.identity is not None or self.token is not None
        self.more = (self.weight, self.limit) if self.weight else (int(self.reusable),)
        if self.whose_limit:
            self.more += (self.whose_limit,)
        self.first = self.more
        if self.max_waiting is not None:
            self.first += (self.max_waiting,) if self.whose_limit or not self.weight else (b"", self.max_waiting)
        self.plain = self.auto_renew and self.max_hold is None and self.weight <= 1

    def again(self, former: int) -> tuple[Argument, ...]:
        """Return the last arguments of a repeated request, whose ticket had the place ``former`` in the queue."""
        return (*self.more, *((b"",) if self.weight and not self.whose_limit else ()), b"", former)

    @property
    def reads(self) -> bool:
        """Whether it is for a reader: any number of readers hold the lock together."""
        return self.limit == WRITER_WEIGHT and self.weight == 1
