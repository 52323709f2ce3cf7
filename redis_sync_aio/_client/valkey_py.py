"""Clients of valkey-py: for each there is a client of redis-py with the same settings, which is used in its place.

valkey-py began as a copy of redis-py, and its settings have the same names. Its commands and errors are of classes of
its own, so its connections are not used: the servers are reached through redis-py, and closing the caller's client
closes that way, too. valkey-py is not imported here; it is looked for among the modules that are.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio import UnixDomainSocketConnection as UnixConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.asyncio.sentinel import SentinelManagedConnection as ManagedConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection as ManagedSSLConnection
from redis.credentials import CredentialProvider

from .._core.display import shown
from .redis_py import close_together, on_close
from .settings import PerClient, RedisClient, check_client

_CARRIED = (
    *("host", "port", "path", "db", "username", "password", "client_name", "protocol"),
    *("encoding", "encoding_errors", "decode_responses", "health_check_interval", "retry_on_timeout"),
    *("socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type"),
    *("ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_data", "ssl_check_hostname"),
    *("ssl_min_version", "ssl_ciphers"),
)
"""Options of connections that mean the same in both libraries."""
_KINDS: dict[str, type[Any]] = {
    "Connection": Connection,
    "SSLConnection": SSLConnection,
    "UnixDomainSocketConnection": UnixConnection,
    "SentinelManagedConnection": ManagedConnection,
    "SentinelManagedSSLConnection": ManagedSSLConnection,
}


def accepted(client: object) -> RedisClient:
    """Return the client of redis-py to use for the client that a user gave: itself, or one with its settings.

    Raises TypeError, which says what to pass instead, for anything that is no asyncio client, and for a client of
    valkey-py whose settings redis-py cannot have.
    """
    valkey = sys.modules.get("valkey.asyncio")
    if valkey is not None and isinstance(client, (valkey.Valkey, valkey.ValkeyCluster)):
        if isinstance(client, valkey.client.Pipeline):
            raise TypeError("expected a client, not a pipeline: pass the valkey.asyncio.Valkey that it was made from")
        return _clients.get(client, lambda: _client_like(client, valkey))
    check_client(client)
    return cast("RedisClient", client)


_clients: PerClient[RedisClient] = PerClient()


def _client_like(client: Any, valkey: ModuleType) -> RedisClient:
    return _cluster_like(client) if isinstance(client, valkey.ValkeyCluster) else _server_like(client)


def _server_like(client: Any) -> Redis:
    pool = client.connection_pool
    options: dict[str, Any] = {**_options(pool.connection_kwargs), "connection_class": _kind(pool.connection_class)}
    made: ConnectionPool
    if (service := getattr(pool, "service_name", None)) is not None:
        manager: Any = Sentinel([], min_other_sentinels=pool.sentinel_manager.min_other_sentinels)  # type: ignore[no-untyped-call]
        manager.sentinels = [_server_like(one) for one in pool.sentinel_manager.sentinels]
        for one in manager.sentinels:  # the caller's own need not be closed
            close_together(pool, one.connection_pool)
        options |= {"is_master": pool.is_master, "check_connection": pool.check_connection}
        made = SentinelConnectionPool(service, manager, **options)  # type: ignore[no-untyped-call]
    elif hasattr(pool, "timeout"):
        made = BlockingConnectionPool(timeout=pool.timeout, max_connections=pool.max_connections, **options)
    else:
        made = ConnectionPool(max_connections=pool.max_connections, **options)
    close_together(pool, made)
    return Redis(connection_pool=made)


def _cluster_like(client: Any) -> RedisCluster:
    options, manager = client.connection_kwargs, client.nodes_manager
    made = RedisCluster(
        startup_nodes=[ClusterNode(node.host, int(node.port)) for node in manager.startup_nodes.values()],
        require_full_coverage=manager.require_full_coverage,
        address_remap=manager.address_remap,
        ssl=issubclass(_kind(options["connection_class"]), SSLConnection),
        **{name: value for name, value in _options(options).items() if name not in ("retry_on_timeout", "db")},
    )
    on_close(client, made, _close)
    return made


async def _close(made: RedisCluster) -> None:
    await made.aclose()  # which the shards that were made from it observe


def _kind(of_valkey: type[Any]) -> type[Any]:
    kind = _KINDS.get(of_valkey.__name__)
    if kind is None or of_valkey.__module__.partition(".")[0] != "valkey":
        raise TypeError(
            f"connections of {of_valkey.__module__}.{of_valkey.__name__} cannot be opened by redis-py, which is used "
            "for locks: pass a redis.asyncio.Redis with a class of its own, or a client with valkey-py's own classes"
        )
    return kind


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of connections of redis-py that are those of valkey-py's."""
    connect = given.get("valkey_connect_func")
    if connect is not None and getattr(connect, "__func__", None) is not _sends_readonly():
        raise TypeError(
            f"valkey_connect_func={shown(connect)} is for connections of valkey-py; pass a redis.asyncio.Redis"
        )
    options = {name: given[name] for name in _CARRIED if name in given}
    if (retry := given.get("retry")) is not None:  # its backoff is called as one of redis-py's
        options["retry"] = Retry(retry._backoff, retry._retries)
    if (provider := given.get("credential_provider")) is not None:
        options["credential_provider"] = _Credentials(provider)
    return options


def _sends_readonly() -> object:
    """Return the callback for each connection of a cluster client that reads from replicas; locks use primaries."""
    return sys.modules["valkey.asyncio"].ValkeyCluster.on_connect


class _Credentials(CredentialProvider):
    """A credential provider of valkey-py, as redis-py asks it."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        """Return the credentials of the provider."""
        return self._provider.get_credentials()

    async def get_credentials_async(self) -> Any:
        """Return the credentials of the provider, awaited if they have to be."""
        found = self.get_credentials()
        return await found if asyncio.iscoroutine(found) else found
