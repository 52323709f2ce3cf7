"""The fixtures of the pytest plugin: plain functions, which need no event loop to be set up and torn down.

A client and a coordinator are made without a loop, and bind to the one that first uses them. They are closed at the end
of that loop, or after the test if the loop keeps running, or runs in another thread. So it does not matter which plugin
runs the tests, with which scope of the loop, or whether the test calls `asyncio.run` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from urllib.parse import parse_qs, urlencode, urlsplit
from weakref import WeakSet

import redis as blocking
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ResponseError

from .._coordinator import Coordinator
from .._core.arguments import one_of, options, require_bool, require_text
from ..embedded import EmbeddedServer
from ._idle import close_hubs, hubs_of, left_in_hubs, left_in_pool

Scope: TypeAlias = Literal["function", "class", "module", "package", "session"]
CLOSE_TIMEOUT = 10.0


@dataclass(frozen=True)
class GivenServer:
    """A database of the server of ``--sync-url``, which no other run uses, nor another xdist worker of this one."""

    url: str
    admin: blocking.Redis
    """The client whose one connection claims the database, by its name."""
    claim: str

    def client(self, **kwargs: Any) -> Redis:
        """Return a new client; options are those of `redis.asyncio.Redis.from_url`."""
        return Redis.from_url(self.url, **kwargs)


Server: TypeAlias = EmbeddedServer | GivenServer
"""The server of the tests: an embedded one, or that of ``--sync-url``."""


class Fixtures(NamedTuple):
    """Two fixtures, for names of a conftest.py.

    Attributes:
        client: The fixture that gives a test its client.
        coordinator: The fixture that gives a test the coordinator of that client.
    """

    client: Any
    coordinator: Any


def make_fixtures(
    scope: Scope = "function",
    *,
    prefix: str = "sync",
    client: Mapping[str, Any] | None = None,
    coordinator: Mapping[str, Any] | None = None,
    clean: bool = True,
) -> Fixtures:
    """Return fixtures ``<prefix>_client`` and ``<prefix>_coordinator`` of another scope, or with other options.

    Args:
        scope: Of pytest. The event loop of the tests has to live as long: a coordinator is used in one loop only.
        prefix: Of their names; those with "sync" take the place of the plugin's.
        client: Options of the client, such as ``{"decode_responses": True}``.
        coordinator: Options of `Coordinator`, such as ``{"claim": 1}``.
        clean: Begin with an empty database. Say False for fixtures that are used within the lifetime of others.

    Example: In conftest.py
        ```python
        from redis_sync_aio.testing import make_fixtures

        module_client, module_coordinator = make_fixtures("module", prefix="module")
        ```
    """
    import pytest

    one_of(scope, get_args(Scope), "scope")
    require_text(prefix, "prefix")
    require_bool(clean, "clean")
    of_client, of_coordinator = options(client, "client"), options(coordinator, "coordinator")

    def make_client(request: pytest.FixtureRequest) -> Iterator[Redis]:
        yield from client_fixture(request, request.getfixturevalue("sync_server"), of_client, clean)

    def make_coordinator(request: pytest.FixtureRequest) -> Iterator[Coordinator]:
        yield from coordinator_fixture(request.getfixturevalue(f"{prefix}_client"), of_coordinator)

    return Fixtures(
        pytest.fixture(scope=scope, name=f"{prefix}_client")(make_client),
        pytest.fixture(scope=scope, name=f"{prefix}_coordinator")(make_coordinator),
    )


# -- what the fixtures do ----------------------------------------------------------------------------------


def server_fixture(config: Any) -> Iterator[Server]:
    """Yield the server of this process: a private one, or a database of the given one."""
    url = config.getoption("sync_url")
    if not url:
        with EmbeddedServer() as private:
            yield private
        return
    given = claim(url)
    with closing(given.admin):
        yield given


def claim(url: str) -> GivenServer:
    """Return the first database, from that of ``url`` on, that no other run and no other xdist worker has claimed.

    The name of a connection is the claim, so nothing is written, and it ends with the process. The server runs one
    transaction after another: of two that claim the same, the later one sees the earlier one.
    """
    import pytest

    more = 0
    while True:
        mine = database_of(url, more)
        admin = blocking.Redis.from_url(mine, max_connections=1)
        name = f"redis_sync_aio_pytest:{admin.get_connection_kwargs()['db']}"
        try:
            with admin.pipeline() as pipe:
                pipe.client_list()
                pipe.client_setname(name)
                others, _ = pipe.execute()
        except ResponseError as error:
            admin.close()
            if more and "out of range" in str(error):
                pytest.fail(f"other runs use all {more} databases from {_shown(url)} on", pytrace=False)
            raise
        if all(other["name"] != name for other in others):
            return GivenServer(mine, admin, name)
        admin.close()
        more += 1


def repair(item: Any, server: Server) -> None:
    """Let a private server run that a test has left paused or dead; fail if tests are to leave nothing."""
    if not isinstance(server, EmbeddedServer):
        return
    if server._paused:
        left = "paused"
        server.resume()
    elif not server.running or server._processes[0].poll() is not None:
        left = "dead"
        server.kill()
        server.start()
    else:
        return
    if item.config.getini("sync_fail_on_leak"):
        import pytest

        pytest.fail(f"left behind by {item.nodeid}: sync_server was {left}; it runs again", pytrace=False)


def database_of(url: str, more: int) -> str:
    """Return the URL of the database that is so many after that of ``url``."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        query = parse_qs(parts.query)
        query["db"] = [str(int(query.get("db", ["0"])[0]) + more)]
        return f"unix://{parts.path}?{urlencode(query, doseq=True)}"
    return parts._replace(path=f"/{int(parts.path.strip('/') or 0) + more}").geturl()


def _shown(url: str) -> str:
    """Return ``url`` without a password."""
    return urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()


def client_fixture(request: Any, server: Server, options: Mapping[str, Any], clean: bool) -> Iterator[Redis]:
    """Yield a client of an empty database; afterwards close all that uses it, and fail if anything was left."""
    private, flush = isinstance(server, EmbeddedServer), bool(request.config.getoption("sync_flush"))
    with ExitStack() as stack:
        if clean:
            if isinstance(server, GivenServer):
                admin = server.admin
                admin.client_setname(server.claim)  # its connection may be another one by now
            else:
                admin = stack.enter_context(closing(blocking.Redis.from_url(server.url)))
            _empty(admin, server.url, private, flush)
            if not private:
                stack.callback(_clear, admin)
        strict = bool(request.config.getini("sync_fail_on_leak"))
        watched = Watched(server.url, options, strict)
        yield watched.client
        watched.finish()
        if strict and watched.left:
            import pytest

            pytest.fail(f"left behind by {request.node.nodeid}: {'; '.join(watched.left)}", pytrace=False)


def coordinator_fixture(client: Redis, options: Mapping[str, Any]) -> Iterator[Coordinator]:
    """Yield a coordinator; the fixture of its client closes it."""
    coordinator = Coordinator(client, **options)
    if isinstance(pool := client.connection_pool, WatchedPool) and pool.watched is not None:
        pool.watched.own.append(coordinator)
    yield coordinator
    _closed_unused(coordinator)


def _closed_unused(coordinator: Coordinator) -> None:
    coordinator._binding._closed_unused = True  # if it was never used: a later use is an error


class WatchedPool(ConnectionPool):
    """A pool of connections that are closed at the end of the event loop that uses them."""

    watched: Watched | None = None

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Return a connection; the end of the running loop will close it."""
        if self.watched is not None:
            self.watched.note()
        return await super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]

    def make_connection(self) -> Any:
        """Return a new connection, for the pool or for a coordinator, which closes it at the end of the loop."""
        if self.watched is not None:
            self.watched.note()
        return super().make_connection()  # type: ignore[no-untyped-call]


class BeforeTheEnd(asyncio.Future[None]):
    """A future that calls ``look`` when a task that awaits it is cancelled because its event loop ends.

    At its end, a runner cancels all tasks before it runs the loop for the last time. So ``look`` still finds all that
    they wait for and hold.
    """

    def __init__(self, look: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._look = look

    def cancel(self, msg: Any = None) -> bool:
        """Look, unless a test cancels all tasks of its loop."""
        if not self.get_loop().is_running():
            self._look()
        return super().cancel(msg)


class Watched:
    """A client and all that uses it, in whichever event loops that is."""

    def __init__(self, url: str, options: Mapping[str, Any], strict: bool) -> None:
        pool = WatchedPool.from_url(url, **options)
        pool.watched = self
        self._strict = strict
        self.client: Redis = Redis.from_pool(pool)
        self.own: list[Coordinator] = []
        """The coordinators of fixtures, which may be open at the end."""
        self.left: list[str] = []
        """The locks and coordinators that were left when a loop ended, or the test."""
        self._ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}
        self._watchers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        """The tasks that await `BeforeTheEnd`, which were not looked at yet."""
        self._ended: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def note(self) -> None:
        """Note that the running loop uses it."""
        loop = asyncio.get_running_loop()
        if loop not in self._ends and loop not in self._ended:
            end = self._ends[loop] = self._at_loop_end(loop)
            with suppress(StopIteration):  # run to its first yield, which registers it with the loop
                end.asend(None).send(None)
            if self._strict:
                self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        async def wait() -> None:
            await BeforeTheEnd(lambda: self._look(loop), loop)

        watcher: Any = asyncio.Task(wait(), loop=loop, name="redis_sync_aio testing waits for the end of the loop")
        watcher._log_destroy_pending = False  # a test may close its loop, and cancel nothing
        self._watchers[loop] = watcher

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the leftovers in a loop, once."""
        if (watcher := self._watchers.pop(loop, None)) is not None:
            own = [coordinator._binding.started for coordinator in self.own]
            self.left += left_in_hubs(self.client, *own, where=lambda hub: hub.loop is loop)
            watcher.cancel()

    async def _at_loop_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._ended.add(loop)
            if self._ends.pop(loop, None) is not None:
                await self._close(loop)

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look(loop)
        self.left += left_in_pool(self.client)
        await close_hubs(self.client, loop)
        await self.client.connection_pool.disconnect()

    def finish(self) -> None:
        """Close the leftovers in loops that keep running."""
        loops = {*self._ends, *(hub.loop for hub in hubs_of(self.client))}
        for loop in loops:
            end = self._ends.pop(loop, None)
            if not loop.is_closed():
                run_in(loop, lambda loop=loop, end=end: self._end(loop, end))  # type: ignore[misc]

    async def _end(self, loop: asyncio.AbstractEventLoop, end: AsyncGenerator[None, None] | None) -> None:
        await self._close(loop)
        if end is not None:
            await end.aclose()


def run_in(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end in a loop that is idle, or that runs in another thread."""
    if not loop.is_running():
        loop.run_until_complete(make())
    else:
        asyncio.run_coroutine_threadsafe(make(), loop).result(CLOSE_TIMEOUT)


def _empty(admin: blocking.Redis, url: str, private: bool, flush: bool) -> None:
    """Empty the database if that is allowed; fail if it is not, and it has keys."""
    import pytest

    if private:
        admin.flushall()
    elif flush:
        admin.flushdb()
    elif keys := list(admin.scan_iter(count=100)):
        shown = ", ".join(repr(key.decode(errors="replace") if isinstance(key, bytes) else key) for key in keys[:3])
        pytest.fail(
            f"the database {_shown(url)} has keys ({shown} …), and tests need an empty one: name another in --sync-url,"
            " or allow them to empty it with --sync-flush",
            pytrace=False,
        )


def _clear(admin: blocking.Redis) -> None:
    """Delete the keys that the test has left: the database was empty before."""
    for keys in iter(lambda: list(admin.scan_iter(count=1000)), []):
        admin.unlink(*keys)
