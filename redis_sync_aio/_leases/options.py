"""The options of a coordinator, checked, as the hub uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict, get_args

from .._client.settings import RETRY_FOR, Client, RedisClient, response_timeout_of
from .._client.valkey_py import accepted
from .._core.arguments import Seconds, one_of, positive_seconds, ttl_ms
from .._core.attached import Attached, Observer
from .._core.backoff import Backoff
from .._core.display import shown
from .._core.keys import checked_prefix, labelled

Push: TypeAlias = Literal["auto", "always", "never"]
"""The way in which waiters are woken; see `Coordinator`."""


class CoordinatorOptions(TypedDict, total=False):
    """The options of a `Coordinator`, as keywords: each key is the argument of that name."""

    prefix: str
    push: Push
    label: str | None
    claim: Seconds
    retry_for: Seconds
    exit_timeout: Seconds
    response_timeout: Seconds | None
    observe: Observer | Iterable[Observer] | None


@dataclass(frozen=True, slots=True)
class HubOptions:
    """The options of a `Coordinator`; times are in seconds."""

    client: RedisClient
    prefix: bytes
    push: Push
    claim_ms: int
    retry_for: float
    exit_timeout: float
    response_timeout: float
    asked_response_timeout: float | None
    """The response timeout if it was an argument; None if it is a setting of the client."""
    observers: tuple[Attached, ...]
    label: bytes = b""
    """The beginning of the tokens of requests without a label of their own: see `Maker.label`."""
    burst: int = 64
    """The number of times that tasks of this process hand a shared lease on while others wait at the server."""
    slice: float = 0.005
    """The time during which they hand it on while others wait."""
    poll_cap: float = 2.5
    """The time after which one command looks at a name that tasks wait for: other clients may have changed it."""
    poll: Backoff = field(default_factory=lambda: Backoff(initial=0.01, cap=0.1))
    """The pauses of waiters that are not woken: those that poll, or wait for a client of another library."""


def hub_options(
    client: Client,
    *,
    prefix: str = "",
    push: Push = "auto",
    label: str | None = None,
    claim: Seconds = 4.5,
    retry_for: Seconds = RETRY_FOR,
    exit_timeout: Seconds = 1.0,
    response_timeout: Seconds | None = None,
    observe: Observer | Iterable[Observer] | None = None,
) -> HubOptions:
    """Check the arguments of a coordinator; the defaults are those of implicit coordinators.

    Raises TypeError or ValueError, as `Coordinator` says.
    """
    redis = accepted(client)
    one_of(push, get_args(Push), "push")
    claim_ms = ttl_ms(claim, "claim")
    retry_for = positive_seconds(retry_for, "retry_for")
    exit_timeout = positive_seconds(exit_timeout, "exit_timeout")
    answered_within = response_timeout_of(redis, response_timeout)
    return HubOptions(
        redis,
        checked_prefix(prefix),
        push,
        claim_ms,
        retry_for,
        exit_timeout,
        answered_within,
        None if response_timeout is None else answered_within,
        _attached(observe),
        labelled(label),
    )


def _attached(observe: Observer | Iterable[Observer] | None) -> tuple[Attached, ...]:
    """Return the observers that a caller gave: none, one, or several."""
    if observe is None:
        return ()
    if isinstance(observe, (str, bytes, Mapping)) or not (callable(observe) or isinstance(observe, Iterable)):
        raise TypeError(f"observe must be a function of an event, or several, not {shown(observe)}")
    return tuple(Attached(observer) for observer in ((observe,) if callable(observe) else observe))
