"""The pytest plugin of redis_sync_aio: a server, a client and a coordinator for each test.

[Testing](https://redis-sync-aio.github.io/redis-sync-aio/guides/testing/) shows how to use it.

It is a module next to the package, and imports pytest only: a run that uses none of the fixtures imports neither the
package nor redis-py. (The package's own ``__init__`` imports both, which takes about a fifth of a second.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from redis_sync_aio import Coordinator
    from redis_sync_aio.testing import Server


SERVER = pytest.StashKey["Server"]()
"""The server of the tests, while there is one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("redis_sync_aio", "locks for asyncio (redis_sync_aio)")
    group.addoption(
        "--sync-url",
        metavar="URL",
        help="server of the tests (one, no cluster), redis://host:port/db: each run, and each xdist worker, uses the"
        " first database from there on that no other one uses; default: a private server for each process",
    )
    group.addoption(
        "--sync-flush",
        action="store_true",
        help="empty the database of --sync-url before each test; default: refuse to use one that has keys",
    )
    parser.addini("sync_fail_on_leak", "fail tests that leave leases, waiting tasks or coordinators", "bool", False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Let a server that a test left paused or dead serve the next one."""
    result = yield
    if (server := item.config.stash.get(SERVER, None)) is not None:
        from redis_sync_aio.testing._fixtures import repair

        repair(item, server)
    return result


@pytest.fixture(scope="session")
def sync_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Server of the tests: a private one of this process, or a database of ``--sync-url``."""
    from redis_sync_aio.testing._fixtures import server_fixture

    for server in server_fixture(request.config):
        request.config.stash[SERVER] = server
        yield server
        del request.config.stash[SERVER]


@pytest.fixture
def sync_client(request: pytest.FixtureRequest, sync_server: Server) -> Iterator[Redis]:
    """Client of an empty database, for any event loop. It closes itself."""
    from redis_sync_aio.testing._fixtures import client_fixture

    yield from client_fixture(request, sync_server, {}, True)


@pytest.fixture
def sync_coordinator(sync_client: Redis) -> Iterator[Coordinator]:
    """Coordinator on ``sync_client``, for the event loop that uses it first. It closes itself."""
    from redis_sync_aio.testing._fixtures import coordinator_fixture

    yield from coordinator_fixture(sync_client, {})
