"""Requests that are made of several, which observers see as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from .._acquire.hub import Hub
from .._leases.grant import Grant

G = TypeVar("G", bound=Grant)


async def followed(
    hub: Hub,
    kind: str,
    names: Sequence[str],
    granting: Callable[[], Awaitable[G | None]],
    *,
    waits: bool,
    label: str = "",
) -> G | None:
    """Await what ``granting`` returns, and tell the observers of ``hub``, if any, what becomes of this request.

    ``waits``: whether it waits for other holders. ``label``: of the request.
    """
    observers = hub.observers
    if observers is None:
        return await granting()
    pattern = observers.pattern_of_all(names)
    return await observers.follow(kind, ", ".join(names), lambda _: granting(), pattern, waits=waits, label=label)
