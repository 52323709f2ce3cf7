"""`support.virtual` gives the clocks back that it takes, and its servers' keys end in virtual time only."""

from __future__ import annotations

import asyncio
import sys
import time
from types import ModuleType

import pytest
from redis.asyncio import Redis

from ...support.inside import clock
from ...support.virtual import virtual_time


def test_a_module_that_was_imported_meanwhile_has_the_real_clock_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `_core.observers`, which is imported with the first observer."""
    real = clock.now
    with virtual_time(lambda: 7.0):
        late = ModuleType("redis_sync_aio.late")
        vars(late)["now"] = clock.now
        assert late.now() == 7.0
        monkeypatch.setitem(sys.modules, late.__name__, late)
    assert late.now is real
    assert clock.now is real


@pytest.mark.parametrize("watching", [False, True], ids=["alone", "watched"])
async def test_a_stall_of_the_machine_ends_no_key(redis: Redis, watching: bool) -> None:
    """Its ttl passes in virtual time only, also while nothing may change the key, as a transaction watches it."""
    if "import-mode" not in await redis.config_get("import-mode"):
        pytest.skip("the server cannot keep keys: Valkey before 8.1, or Redis")
    await redis.set("key", "value", px=100)
    async with redis.pipeline() as talk:
        if watching:
            await talk.watch("key")
        time.sleep(0.2)  # noqa: ASYNC251
        assert await redis.get("key") == b"value"
    assert await redis.pttl("key") > 0
    await asyncio.sleep(60)
    assert await redis.get("key") is None


async def test_no_server_has_the_port_of_a_listener() -> None:
    """Else a client of that server would reach a proxy. `EmbeddedServer` takes ports of 20000-29999."""
    listener = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    _, port = listener.sockets[0].getsockname()
    assert 1024 <= port < 20000
    listener.close()
