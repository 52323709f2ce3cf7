"""Addresses as users give them, of a server, a primary that Sentinel names, or a cluster; and clients made from them.

No message of this module quotes any part of an address that could not be read: it might be a password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel

from .._core import arguments
from .settings import RedisClient

Topology: TypeAlias = Literal["server", "sentinel", "cluster"]

FORMS = (
    "redis://HOST:PORT/DB, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB or redis+cluster://HOST:PORT "
    "(rediss… for TLS)"
)
_TOPOLOGIES: dict[str, tuple[Topology, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("server", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_PORTS: dict[Topology, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}


class BadAddress(ValueError):
    """The address cannot be read. The message quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address, taken apart."""

    topology: Topology
    shown: str
    """The address as messages may print it: hosts, ports and the service, never credentials."""
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    db: int = 0
    url: str = field(default="", repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


def parse_address(url: str) -> Address:
    """Take an address apart; raise BadAddress if it has none of the documented forms."""
    url = url.strip()
    scheme, has_scheme, _ = url.partition("://")
    if not has_scheme:
        raise BadAddress(f"the address has no scheme, such as redis://: use {FORMS}")
    if scheme.lower() not in _TOPOLOGIES:
        raise BadAddress(f"the scheme of the address is not one of {', '.join(_TOPOLOGIES)}: use {FORMS}")
    try:
        parts = urlsplit(url)
    except ValueError:  # an open bracket
        raise BadAddress(f"the address has a character that cannot stand where it is: use {FORMS}") from None
    topology, tls = _TOPOLOGIES[parts.scheme]
    rest = parts.path + parts.query + parts.fragment
    if parts.fragment or ("@" in rest and (parts.scheme != "unix" or parts.netloc)):
        raise BadAddress("the address has a special character in its password: write / as %2F, # as %23, ? as %3F")
    try:
        return _taken_apart(url, parts, topology, tls)
    except BadAddress:
        raise
    except ValueError:  # of urllib, which quotes what it could not read
        raise BadAddress(f"the address has a host, a port or a number that cannot be read: use {FORMS}") from None


def _taken_apart(url: str, parts: SplitResult, topology: Topology, tls: bool) -> Address:
    user, password = _credentials(parts.netloc)
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise BadAddress("a unix:// address needs the path of the socket: unix:///run/redis/redis.sock")
        path = unquote(parts.path)
        return Address(topology, f"unix:{path}", False, (), url=url, username=user, password=password)
    hosts = _hosts(parts.netloc.rpartition("@")[2], topology)
    shown = ",".join(f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in hosts)
    segments = [unquote(part) for part in parts.path.split("/") if part]
    service = ""
    if topology == "server" and len(hosts) > 1:
        raise BadAddress("several hosts need redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST")
    if topology == "sentinel":
        if not segments:
            raise BadAddress("a Sentinel address names the service: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
        service, *segments = segments
        shown = f"service {service!r} of Sentinel at {shown}"
    if topology == "cluster":
        if segments not in ([], ["0"]):
            raise BadAddress("a cluster has database 0 only: leave /DB out of the redis+cluster:// address")
        shown = f"cluster at {shown}"
    if topology != "server" and parts.query:
        raise BadAddress("?name=value works in redis://, rediss:// and unix:// addresses only: use the options instead")
    if len(segments) > 1:
        raise BadAddress(f"the address has a path that is too long: use {FORMS}")
    db = int(segments[0]) if segments else 0
    shown += f", db {db}" if db else ""
    return Address(topology, shown, tls, hosts, service, db, url, user, password)


def _credentials(netloc: str) -> tuple[str | None, str | None]:
    found, has_any, _ = netloc.rpartition("@")
    if not has_any:
        return None, None
    user, _, password = found.partition(":")
    return unquote(user) or None, unquote(password) or None


def _hosts(netloc: str, topology: Topology) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for part in netloc.split(","):
        one = urlsplit(f"//{part}")
        found.append((one.hostname or "localhost", one.port or _PORTS[topology]))
    return tuple(found)


# -- Clients that are made from an address, and closed by what made them -------------------------------------------


_closing: set[asyncio.Task[None]] = set()


class OwnedClient:
    """A client, and the clients of the sentinels that lead to its server."""

    def __init__(self, client: RedisClient, sentinels: tuple[Redis, ...] = ()) -> None:
        self.client = client
        self._sentinels = sentinels

    async def close(self) -> None:
        """Close all of them, also after an error or a cancellation. Idempotent."""
        clients = (self.client, *self._sentinels)
        await _close_all(clients)

    def start_closing(self) -> asyncio.Task[None]:
        """Start to `close` in the running loop. The task is kept until it is done."""
        task = asyncio.create_task(self.close(), name="redis_sync_aio close of a client")
        _closing.add(task)
        task.add_done_callback(_closing.discard)
        return task


async def _close_all(clients: tuple[RedisClient, ...]) -> None:
    if clients:
        try:
            await clients[0].aclose()
        finally:
            await _close_all(clients[1:])


def owned_client(url: str, options: Mapping[str, Any] | None) -> OwnedClient:
    """Make a client for ``url``, with ``options`` of redis-py. It connects when it is used.

    Raises BadAddress, a ValueError that quotes nothing of an address it cannot read.
    """
    if not isinstance(url, str):
        raise TypeError(f"the url must be str, not {type(url).__name__}")
    address, more = parse_address(url), arguments.options(options, "client_options")
    if address.topology == "server":
        return OwnedClient(Redis.from_url(address.url, **more))
    more = _from(address) | more
    if address.topology == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return OwnedClient(RedisCluster(startup_nodes=nodes, **more))
    tls = {name: value for name, value in more.items() if name.startswith("ssl")}
    own = tls | dict(more.pop("sentinel_kwargs", None) or {})
    sentinel: Any = Sentinel(address.hosts, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
    client = sentinel.master_for(address.service, **({"db": address.db} | more))
    return OwnedClient(client, tuple(sentinel.sentinels))


def refuse_client_options(coordinator: Callable[..., object], options: Mapping[str, object]) -> None:
    """Raise TypeError if ``coordinator`` does not take all ``options``; it says where arguments of the client go."""
    taken = signature(coordinator).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    if unknown := [name for name in options if name not in taken]:
        raise TypeError(
            f"from_url() does not take {', '.join(map(repr, unknown))}: arguments of the client go into "
            f"client_options={{{unknown[0]!r}: …}}"
        )


def _from(address: Address) -> dict[str, Any]:
    """Return the options of redis-py that stand in ``address``."""
    given: dict[str, Any] = {"username": address.username, "password": address.password, "ssl": address.tls or None}
    return {name: value for name, value in given.items() if value is not None}
