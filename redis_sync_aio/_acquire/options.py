"""The options of a coordinator, checked, as the hub uses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, get_args

from .._client.retry import RETRY_FOR
from .._client.settings import Client, RedisClient, response_timeout_of
from .._client.valkey_py import accepted
from .._core.arguments import Seconds, count, one_of, positive_seconds, ttl_ms
from .._core.attached import Attached, Observer, PatternOf
from .._core.backoff import Backoff
from .._core.display import shown
from .._core.prefixes import checked_prefix

MOST_POLL_CAP = 300.0
"""Seconds. The queue of waiters lives for twice as long after the latest look."""

Push: TypeAlias = Literal["auto", "always", "never"]
"""The way in which waiters are woken; see `Coordinator`."""


class CoordinatorOptions(TypedDict, total=False):
    """The options of a `Coordinator`, as keywords: each key is the argument of that name."""

    prefix: str
    push: Push
    claim: Seconds
    burst: int
    slice: Seconds
    retry_for: Seconds
    poll_cap: Seconds
    poll: Backoff | None
    exit_timeout: Seconds
    response_timeout: Seconds | None
    observe: Observer | Iterable[Observer] | None
    pattern_of: PatternOf | None


@dataclass(frozen=True, slots=True)
class HubOptions:
    """The options of a `Coordinator`; times are in seconds."""

    client: RedisClient
    prefix: bytes
    push: Push
    claim_ms: int
    burst: int
    slice: float
    retry_for: float
    poll_cap: float
    poll: Backoff
    exit_timeout: float
    response_timeout: float
    asked_response_timeout: float | None
    """The response timeout if it was an argument; None if it is a setting of the client."""
    observers: tuple[Attached, ...]


def hub_options(
    client: Client,
    *,
    prefix: str = "",
    push: Push = "auto",
    claim: Seconds = 4.5,
    burst: int = 64,
    slice: Seconds = 0.005,
    retry_for: Seconds = RETRY_FOR,
    poll_cap: Seconds = 2.5,
    poll: Backoff | None = None,
    exit_timeout: Seconds = 1.0,
    response_timeout: Seconds | None = None,
    observe: Observer | Iterable[Observer] | None = None,
    pattern_of: PatternOf | None = None,
) -> HubOptions:
    """Check the arguments of a coordinator; the defaults are those of implicit coordinators.

    Raises TypeError or ValueError, as `Coordinator` says.
    """
    redis = accepted(client)
    one_of(push, get_args(Push), "push")
    claim_ms = ttl_ms(claim, "claim")
    burst, slice = count(burst, "burst"), positive_seconds(slice, "slice")
    retry_for = positive_seconds(retry_for, "retry_for")
    poll_cap = min(positive_seconds(poll_cap, "poll_cap"), MOST_POLL_CAP)
    if poll is not None and not isinstance(poll, Backoff):
        raise TypeError(f"poll must be a Backoff or None, not {shown(poll)}")
    exit_timeout = positive_seconds(exit_timeout, "exit_timeout")
    answered_within = response_timeout_of(redis, response_timeout)
    return HubOptions(
        redis,
        checked_prefix(prefix),
        push,
        claim_ms,
        burst,
        slice,
        retry_for,
        poll_cap,
        poll if poll is not None else Backoff(initial=0.01, cap=0.1),
        exit_timeout,
        answered_within,
        None if response_timeout is None else answered_within,
        _attached(observe, pattern_of),
    )


def _attached(observe: Observer | Iterable[Observer] | None, pattern_of: PatternOf | None) -> tuple[Attached, ...]:
    """Return the observers that a caller gave: none, one, or several."""
    if pattern_of is not None and not callable(pattern_of):
        raise TypeError(f"pattern_of must be a function of a name, not {shown(pattern_of)}")
    if observe is None:
        if pattern_of is not None:
            raise ValueError("pattern_of is for events, and there is no observer: give observe=, too")
        return ()
    if not callable(observe) and not isinstance(observe, Iterable):
        raise TypeError(f"observe must be a function of an event, or several, not {shown(observe)}")
    observers = (observe,) if callable(observe) else tuple(observe)
    for observer in observers:
        if not callable(observer):
            raise TypeError(f"an observer must be a function of an event, not {shown(observer)}")
    return tuple(Attached(observer, pattern_of) for observer in observers)
