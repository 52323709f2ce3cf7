"""The options of a coordinator, checked, as the hub uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, TypedDict, get_args

from .._client.settings import RETRY_FOR, Client, RedisClient, response_timeout_of
from .._client.valkey_py import accepted
from .._core.arguments import Seconds, one_of, positive_seconds, ttl_ms
from .._core.backoff import Backoff
from .._core.display import shown
from .._core.keys import checked_prefix, labelled
from .._core.observing import Attached, Observer

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


class HubOptions:
    """The options of a coordinator, checked. The defaults are those of implicit coordinators; times are in seconds.

    Raises TypeError or ValueError, as `Coordinator` says.
    """

    burst: int = 64
    """The number of times that tasks of this process hand a shared lease on while others wait at the server."""
    slice: float = 0.005
    """The time during which they hand it on while others wait."""
    poll_cap: float = 2.5
    """The time after which one command looks at a name that tasks wait for: other clients may have changed it."""
    poll: Backoff = Backoff(initial=0.01, cap=0.1)
    """The pauses of waiters that are not woken: those that poll, or wait for a client of another library."""

    def __init__(
        self,
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
    ) -> None:
        self.client: RedisClient = accepted(client)
        self.prefix: bytes = checked_prefix(prefix)
        one_of(push, get_args(Push), "push")
        self.push: Push = push
        self.label: bytes = labelled(label)
        """The beginning of the tokens of requests without a label of their own: see `Maker.label`."""
        self.claim_ms: int = ttl_ms(claim, "claim")
        self.retry_for: float = positive_seconds(retry_for, "retry_for")
        self.exit_timeout: float = positive_seconds(exit_timeout, "exit_timeout")
        self.response_timeout: float = response_timeout_of(self.client, response_timeout)
        self.asked_response_timeout: float | None = None if response_timeout is None else self.response_timeout
        """The response timeout if it was an argument; None if it is a setting of the client."""
        self.observers: tuple[Attached, ...] = _attached(observe)


def _attached(observe: Observer | Iterable[Observer] | None) -> tuple[Attached, ...]:
    """Return the observers that a caller gave: none, one, or several."""
    if observe is None:
        return ()
    if isinstance(observe, (str, bytes, Mapping)) or not (callable(observe) or isinstance(observe, Iterable)):
        raise TypeError(f"observe must be a function of an event, or several, not {shown(observe)}")
    return tuple(Attached(observer) for observer in ((observe,) if callable(observe) else observe))
