"""For tests of programs that use locks: servers of one's own, faults on the wire, losses on demand.

Servers, alone and in groups, are context managers, by ``with`` and by ``async with``. They take a fraction of a second
to two seconds to start, listen on 127.0.0.1, and die with the process that started them::

    from redis_sync_aio.embedded import EmbeddedServer
    from redis_sync_aio.testing.faults import Action, FaultProxy

    async with EmbeddedServer() as server, FaultProxy(server) as proxy, proxy.client() as client:
        proxy.on("EVALSHA", Action.CUT_AFTER)  # the server answers the next call of a script, and the answer is lost
        async with AsyncLock(client, "orders:42"):
            ...

`testing.faults` has the proxy and its actions, `testing.servers` has servers in groups.
[Testing](https://redis-sync-aio.github.io/redis-sync-aio/guides/testing/) has more, and the fixtures for pytest.
"""

from __future__ import annotations

from ._fixtures import Fixtures, Server, make_fixtures
from ._idle import assert_idle
from ._lifespan import run_lifespan
from ._losses import freeze_renewals, lose, steal

__all__ = [
    "Fixtures",
    "Server",
    "assert_idle",
    "freeze_renewals",
    "lose",
    "make_fixtures",
    "run_lifespan",
    "steal",
]
