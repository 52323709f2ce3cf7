"""For tests of programs that use locks: servers of one's own, faults on the wire, losses on demand.

Servers, alone and in groups, are context managers, by ``with`` and by ``async with``. They take a fraction of a second
to two seconds to start, listen on 127.0.0.1, and die with the process that started them::

    from redis_sync_aio.testing import CUT_AFTER, EmbeddedServer, FaultProxy

    async with EmbeddedServer() as server, FaultProxy(server) as proxy, proxy.client() as client:
        proxy.on("EVALSHA", CUT_AFTER)  # the server answers the next call of a script, and the answer is lost
        async with AsyncLock(client, "orders:42"):
            ...

[Testing](https://redis-sync-aio.github.io/redis-sync-aio/guides/testing/) has more, and the fixtures for pytest.
"""

from __future__ import annotations

from ..embedded import EmbeddedServer
from ._cluster import ClusterTopology
from ._faults import (
    CUT_AFTER,
    CUT_AFTER_REPLY,
    CUT_BEFORE,
    CUT_INSIDE_REPLY,
    DROP,
    DUPLICATE,
    HOLD,
    HOLD_REPLY,
    PASS,
    SWALLOW_REPLY,
    SWALLOW_REQUEST,
    Action,
    Fault,
    Passage,
    Rule,
    answer_error,
    delay,
    delay_reply,
)
from ._fixtures import Fixtures, Scope, Server, make_fixtures
from ._idle import assert_idle
from ._losses import freeze_renewals, lose, steal
from ._proxy import FaultProxy, Match, Upstream
from ._resp import Frame, Predicate, anything, arg, command, script
from ._sentinel import SentinelTopology
from ._topology import IndependentServers, Topology

__all__ = [
    "CUT_AFTER",
    "CUT_AFTER_REPLY",
    "CUT_BEFORE",
    "CUT_INSIDE_REPLY",
    "DROP",
    "DUPLICATE",
    "HOLD",
    "HOLD_REPLY",
    "PASS",
    "SWALLOW_REPLY",
    "SWALLOW_REQUEST",
    "Action",
    "ClusterTopology",
    "EmbeddedServer",
    "Fault",
    "FaultProxy",
    "Fixtures",
    "Frame",
    "IndependentServers",
    "Match",
    "Passage",
    "Predicate",
    "Rule",
    "Scope",
    "SentinelTopology",
    "Server",
    "Topology",
    "Upstream",
    "answer_error",
    "anything",
    "arg",
    "assert_idle",
    "command",
    "delay",
    "delay_reply",
    "freeze_renewals",
    "lose",
    "make_fixtures",
    "script",
    "steal",
]
