"""What tests see of names, and of the work of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis_sync_aio import wait_until
from redis_sync_aio.inspection import NameView, escape, inspect
from redis_sync_aio.types import Client

from .body import FAST


async def seen(client: Client, name: str, condition: Callable[[NameView], object]) -> NameView:
    """Wait until the view of ``name``, which is one thing, is as ``condition`` says, and return it."""

    async def as_wanted() -> NameView | None:
        found = await inspect(client, escape(name))
        return found[0] if found and condition(found[0]) else None

    view = await wait_until(as_wanted, FAST, timeout=20)
    assert view is not None
    return view


async def calls(client: Any, *names: str) -> int:
    """Return how often the server has run these commands; by default: scripts, those of virtual time included."""
    stats = await client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names or ("eval", "evalsha"))
