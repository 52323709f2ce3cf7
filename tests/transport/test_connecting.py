"""P3, P12: whatever goes wrong while connecting is kept in `trouble`, logged once, tried again, and told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from redis_sync_aio import AsyncLock, AsyncRedlock, Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.servers import IndependentServers, SentinelTopology
from redis_sync_aio.types import Push

from ..support.body import FAST, waits
from ..support.inside import now, tuned
from ..support.topologies import Nodes

NAME = "connecting"
NEVER_LOOK: dict[str, Any] = {"poll_cap": 300}
"""Options of a coordinator that hears of a release by a push, or not at all."""


class Vault(CredentialProvider):
    """Knows the password, unless it is out of order."""

    def __init__(self) -> None:
        self.error: Callable[[], BaseException] = KeyError
        self.times = 0  # that it raises that; negative: always
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        if self.times:
            self.times -= 1
            raise self.error()
        return "default", "any"

    def fail(self, error: Callable[[], BaseException] = lambda: KeyError("token"), times: int = -1) -> None:
        """Raise an error from now on."""
        self.error, self.times = error, times


class Place:
    """Servers, and clients of them that ask a vault for the password."""

    def __init__(self, client: Callable[[Vault], Any], servers: Sequence[EmbeddedServer], name: str = NAME) -> None:
        self.client = client
        self.name = name
        self._servers = servers

    async def cut(self) -> None:
        """Close all connections on which something is heard, at the servers."""
        for server in self._servers:
            async with server.client() as admin:
                await admin.client_kill_filter(_type="pubsub")


@pytest.fixture(params=["standalone", "sentinel", "shards"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "shards":
        nodes: Nodes = request.getfixturevalue("nodes")
        return Place(lambda vault: nodes.client(credential_provider=vault), nodes.primaries, nodes.name_at(0, NAME))
    if request.param == "sentinel":
        group: SentinelTopology = request.getfixturevalue("group")
        return Place(lambda vault: group.client(credential_provider=vault), [group.primary])
    server: EmbeddedServer = request.getfixturevalue("server")
    return Place(lambda vault: server.client(credential_provider=vault), [server])


@asynccontextmanager
async def processes(place: Place, **options: Any) -> AsyncIterator[tuple[Coordinator, Coordinator, Vault]]:
    """Two processes, and the vault of the first one."""
    vault = Vault()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(place.client(it)) for it in (vault, Vault())]
        first = await stack.enter_async_context(tuned(clients[0], **options))
        yield first, await stack.enter_async_context(Coordinator(clients[1])), vault


def logged(caplog: pytest.LogCaptureFixture, event: str = "connecting_failed") -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_waiter_hears_of_the_release(place: Place, cancelled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection was lost and the next one could not be opened: it is tried again until the vault is in order.

    Also if a program ``cancelled`` all tasks but some, those of the link among them.
    """
    async with processes(place, **NEVER_LOOK) as (sync, other, vault):
        holder = await AsyncLock(other, place.name).acquire()
        waiting = asyncio.create_task(AsyncLock(sync, place.name).acquire())
        await wait_until(waits(AsyncLock(other, place.name)), FAST, timeout=10)
        vault.fail()
        opened = sync.connections
        await place.cut()
        await wait_until(lambda: isinstance(sync.connection_error, KeyError), FAST, timeout=10)
        if cancelled:
            tasks = [task for task in asyncio.all_tasks() if task.get_name() == "redis_sync_aio link"]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        else:
            asked = vault.asked
            await wait_until(lambda: vault.asked >= asked + 3, FAST, timeout=10)
        vault.times = 0
        await wait_until(lambda: sync.connections > opened and sync.connection_error is None, FAST, timeout=10)
        await holder.release()
        await (await asyncio.wait_for(waiting, 10)).release()
    if not cancelled:
        (record,) = logged(caplog)
        assert "KeyError: 'token'" in record.getMessage()
        assert record.exc_info is not None
        assert not logged(caplog, "connection_lost")
        assert len(logged(caplog, "connection_restored")) == 1


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError], ids=["raised", "cancelled itself"])
async def test_one_failure_is_retried(place: Place, push: Push, error: type[BaseException]) -> None:
    """An acquire has `retry_for` seconds; a vault that is out of order for less costs it nothing."""
    async with processes(place, push=push) as (sync, _, vault):
        vault.fail(error, times=2)
        await (await AsyncLock(sync, place.name).acquire()).release()
        assert vault.times == 0
        assert sync.connection_error is None


class Stop(BaseException):
    """As what `pytest.fail` raises."""


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_what_is_no_exception_ends_what_waits_for_it(place: Place, push: Push) -> None:
    """It is not tried again, and comes out of the event loop, too."""
    loop, raised = asyncio.get_running_loop(), list[type[object]]()
    loop.set_exception_handler(lambda _, context: raised.append(type(context["exception"])))
    async with processes(place, push=push, retry_for=600) as (sync, _, vault):
        vault.fail(Stop, times=1)
        async with asyncio.timeout(60):
            with pytest.raises(Unreachable, match="the client raised Stop") as caught:
                await AsyncLock(sync, place.name).acquire()
            assert isinstance(caught.value.__cause__, Stop)
            await wait_until(lambda: Stop in raised, FAST)
            await (await AsyncLock(sync, place.name).acquire()).release()


@pytest.mark.parametrize("push", ["auto", "never"])
async def test_it_is_told_as_what_it_is(place: Place, push: Push, caplog: pytest.LogCaptureFixture) -> None:
    """After `retry_for` the caller learns that it is the client, and neither Redis nor the network."""
    async with processes(place, push=push, retry_for=15) as (sync, _, vault):
        vault.fail()
        begun = now()
        with pytest.raises(
            Unreachable, match=rf"'{place.name}' got no answer .* the client raised KeyError: 'token'"
        ) as caught:
            await AsyncLock(sync, place.name).acquire()
        assert now() - begun >= 15
        assert "check the server" not in str(caught.value)
        assert isinstance(caught.value.__cause__, KeyError)
        assert isinstance(sync.connection_error, KeyError)
        with pytest.raises(Unreachable, match="KeyError"):
            await AsyncLock(sync, place.name).acquire(timeout=5)
        await asyncio.sleep(30)  # nothing needs a connection
        vault.times = 0
        await (await AsyncLock(sync, place.name).acquire()).release()
    assert len(logged(caplog)) == 1
    (back,) = logged(caplog, "connection_restored")
    assert vars(back)["after"] >= 15 + 5 + 30


async def test_an_outage_that_begins_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is away after that is logged as ever."""
    with EmbeddedServer(port=0) as server:
        place = Place(lambda vault: server.client(credential_provider=vault), [server])
        async with processes(place) as (sync, _, vault):
            await AsyncLock(sync, NAME).acquire()
            vault.fail()
            await place.cut()
            await wait_until(lambda: bool(logged(caplog)), FAST, timeout=10)
            server.kill()
            vault.times = 0
            await wait_until(lambda: bool(logged(caplog, "connection_lost")), FAST, timeout=10)
            server.start()
            await wait_until(lambda: bool(logged(caplog, "connection_restored")), FAST, timeout=10)


async def test_one_server_of_a_redlock() -> None:
    """A majority is enough; without one the error says why."""
    vaults = [Vault() for _ in range(3)]
    async with IndependentServers(3) as group, AsyncExitStack() as stack:
        clients: list[Redis] = []
        for server, vault in zip(group.servers, vaults, strict=True):
            clients.append(await stack.enter_async_context(server.client(credential_provider=vault)))
        lock = AsyncRedlock(clients, NAME)
        vaults[0].fail()
        async with lock:
            pass
        vaults[1].fail()
        async with group.servers[1].client() as admin:
            await admin.client_kill_filter(_type="pubsub")
        with pytest.raises(Unreachable, match="KeyError"):
            await AsyncRedlock(clients, "another").acquire(timeout=1)
        vaults[0].times = vaults[1].times = 0
