"""Bad arguments."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Any

from redis.asyncio import Redis

Table = Mapping[str, tuple[Any, type[Exception]]]
BAD_SECONDS: Table = {
    "text": ("5", TypeError),
    "true": (True, TypeError),
    "decimal": (Decimal(5), TypeError),
    "negative": (-1, ValueError),
    "nan": (math.nan, ValueError),
    "inf": (math.inf, ValueError),
    "negative timedelta": (timedelta(seconds=-1), ValueError),
    "huge int": (10**400, ValueError),
}
BAD_TTL: Table = {**BAD_SECONDS, "0": (0, ValueError), "0.1 ms": (0.0001, ValueError), "1e18": (1e18, ValueError),
           "1e306": (1e306, ValueError)}  # fmt: skip
BAD_NAME: Table = {
    "empty": ("", ValueError),
    "no bytes": (b"", ValueError),
    "1 MB": ("x" * (1 << 20), ValueError),
    "surrogate": ("\ud800", ValueError),
    "int": (5, TypeError),
    "none": (None, TypeError),
}
BAD_IDENTITY: Table = {"empty": ("", ValueError), "int": (5, TypeError), "surrogate": ("\ud800", ValueError)}


@asynccontextmanager
async def nothing_sent(observer: Redis) -> AsyncIterator[None]:
    """The server sees no command but the observer's own, and has no key."""
    await observer.config_resetstat()
    yield
    seen = set(await observer.info("commandstats"))
    assert seen <= {"cmdstat_config|resetstat", "cmdstat_info"}, seen
    assert await observer.dbsize() == 0
