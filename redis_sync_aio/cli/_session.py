"""Connect to where the options lead, run a command there, and end with an exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from .._client.address import Address
from ._failures import EXPECTED, INTERRUPTED, Failure, explained
from ._output import Output, complain, end_output, print_traceback
from ._shared import Shared


@dataclass(frozen=True, slots=True)
class Session:
    """The client, server and output that a command works with."""

    client: Redis | RedisCluster
    address: Address
    output: Output
    another_client: Callable[..., Redis]
    """Makes a client of the same server (in a cluster: of one node), with some options changed."""
    response_timeout: float
    """Seconds that an answer may take."""
    sentinels: tuple[Redis, ...] = ()
    """A client of each sentinel, for an address with Sentinel."""
    prefix: str = ""
    """The prefix of the coordinators that the command is about."""
    server_at: Callable[[str, int], Redis] | None = None
    """Makes a client of any server of that service, by its address."""
    sentinel_at: Callable[[str, int], Redis] | None = None
    """Makes a client of any sentinel, by its address."""


def execute(
    shared: Shared,
    body: Callable[[Session], Awaitable[int]],
    *,
    check: Callable[[], None] | None = None,
    **options: Any,
) -> NoReturn:
    """Run ``body`` in an event loop with a connected client, and exit with the code that it returns.

    Errors of servers, networks and addresses become one line on stderr. ``check`` is called before that, and raises
    Failure for wrong usage. ``options`` go to the client.
    """
    if not shared.debug:  # what matters of it is said in one line
        logging.getLogger("redis_sync_aio").addHandler(logging.NullHandler())
    try:
        if check is not None:
            check()
        code = asyncio.run(_run(shared, body, options))
        sys.stdout.flush()
    except BrokenPipeError:  # as in `redis-sync-aio ls | head`
        end_output(sys.stdout)
        code = 0
    except Failure as failure:
        if shared.debug:
            print_traceback(failure)
        complain(str(failure))
        code = failure.code
    except (KeyboardInterrupt, asyncio.CancelledError):  # the latter while `_run` goes on
        code = INTERRUPTED
    raise typer.Exit(code)


async def _run(shared: Shared, body: Callable[[Session], Awaitable[int]], options: dict[str, Any]) -> int:
    with _interruptible():
        async with connect(shared, **options) as session:
            return await body(session)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C cancel this task.

    The handler of `asyncio.run` is called between bytecodes: a signal that comes after the last of them, before the
    loop begins to wait, is not noticed until something else wakes the loop. One that the loop knows wakes it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:  # what `asyncio.run` does at last may wait for a name server: Ctrl-C ends that again
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def connect(shared: Shared, **options: Any) -> AsyncIterator[Session]:
    """Connect as the options say, and close in the end; raise Failure for errors there and in the body.

    The connection is tried before the body runs, without a command that an ACL might refuse.
    """
    address = shared.address()
    try:
        async with _connected(shared, address, _client_options(shared, address) | options) as session:
            yield session
    except BrokenPipeError:  # of the output: redis-py has errors of its own
        raise
    except EXPECTED as error:
        raise explained(error, address) from error
    except ExceptionGroup as errors:
        if errors.split(EXPECTED)[1] is not None:
            raise
        raise explained(errors, address) from errors


def _client_options(shared: Shared, address: Address) -> dict[str, Any]:
    limit = shared.connect_timeout
    # RESP2 is what every server and proxy speaks. Locks have a connection of their own, which tries RESP3.
    options: dict[str, Any] = {"socket_timeout": limit, "socket_connect_timeout": limit, "protocol": 2}
    if (user := address.username or shared.username) is not None:
        options["username"] = user
    if (password := address.password or shared.password) is not None:
        options["password"] = password
    for name, path in (("ca_certs", shared.tls_ca), ("certfile", shared.tls_cert), ("keyfile", shared.tls_key)):
        if path is not None:
            options[f"ssl_{name}"] = str(path)
    if shared.tls_insecure:
        options |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    return options


@asynccontextmanager
async def _connected(shared: Shared, address: Address, options: dict[str, Any]) -> AsyncIterator[Session]:
    output, timeout, retry = shared.output(), shared.connect_timeout, Retry(NoBackoff(), 0)
    if address.topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        options |= {"ssl": address.tls}
        # A cluster that is not whole is what some commands are for.
        async with RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options) as cluster:

            def node(**more: Any) -> Redis:
                first: Any = cluster.get_primaries()[0]
                return Redis(host=first.host, port=first.port, retry=retry, **(options | more))

            yield Session(cluster, address, output, node, timeout, prefix=shared.prefix)
    elif address.topology == "server":

        def server(**more: Any) -> Redis:
            return Redis.from_url(address.url, retry=retry, **(options | more))

        async with server() as client:
            await try_to_connect(client)
            yield Session(client, address, output, server, timeout, prefix=shared.prefix)
    else:
        own = {"username": shared.sentinel_username, "password": shared.sentinel_password, "ssl": address.tls}
        kept = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_", "protocol"))}
        options |= {"ssl": address.tls, "db": address.db, "retry": retry}
        kept |= own | {"retry": retry}
        sentinel: Any = Sentinel(address.hosts, sentinel_kwargs=kept)  # type: ignore[no-untyped-call]

        def primary(**more: Any) -> Redis:
            made: Redis = sentinel.master_for(address.service, **(options | more))
            return made

        def server_at(host: str, port: int) -> Redis:
            return Redis(host=host, port=port, **options)

        def sentinel_at(host: str, port: int) -> Redis:
            return Redis(host=host, port=port, **kept)

        try:
            async with primary() as client:
                await try_to_connect(client)
                watching = tuple(sentinel.sentinels)
                yield Session(
                    client, address, output, primary, timeout, watching, shared.prefix, server_at, sentinel_at
                )
        finally:
            for one in sentinel.sentinels:
                await one.aclose()


async def try_to_connect(client: Redis) -> None:
    """Open a connection, without a command that an ACL might refuse; raise redis-py's errors."""
    pool: Any = client.connection_pool
    await pool.release(await pool.get_connection())
