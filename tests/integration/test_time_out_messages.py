"""What the errors of those say whose time is up: why, and what to do."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, Unreachable

NAME = "job"


@pytest.mark.parametrize("share", [False, True])
async def test_a_server_out_of_reach(share: bool) -> None:
    """What redis-py said, and what to look at."""
    async with Redis(port=1) as client, Coordinator(client, retry_for=0.5) as sync:
        with pytest.raises(Unreachable, match="check the server and the network") as caught:
            await AsyncLock(sync, NAME, share=share).acquire(timeout=0.2)
        assert f"{NAME!r} within 0.2 seconds: ConnectionError: Error" in str(caught.value)
        assert caught.value.__cause__ is sync.trouble
