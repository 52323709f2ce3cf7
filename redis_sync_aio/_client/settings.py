"""Settings of the caller's client, read from public attributes of redis-py, and its retries."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import ReferenceType, ref

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import SSLConnection

from .._core.arguments import Name, Seconds, positive_seconds
from .._core.backoff import Backoff
from .._core.display import shown
from ..errors import WrongContext

RedisClient: TypeAlias = Redis | RedisCluster
"""A client of redis-py."""


class ValkeyClient(Protocol):
    """A `valkey.asyncio.Valkey` or `ValkeyCluster`, by what types can tell of it without valkey-py."""

    def get_encoder(self) -> Any:
        """Return the encoder of keys."""
        ...

    async def aclose(self) -> None:
        """Close the client."""


Client: TypeAlias = RedisClient | ValkeyClient
"""A client as users pass it."""

DEFAULT_TIMEOUT = 5.0

T = TypeVar("T")


class Same:
    """Key that identifies one object: two keys are equal if they stand for the very same object.

    A client may define ``__eq__``, and so be equal to a client of another database, or not be hashable.
    """

    __slots__ = ("_object",)

    def __init__(self, it: object) -> None:
        self._object = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


class PerClient(Generic[T]):
    """Facts about clients, by identity as in `Same`; each is kept as long as its client lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[object], T]] = {}

    def get(self, client: object, make: Callable[[], T]) -> T:
        """Return the fact about ``client``; make it first if there is none."""
        known = self._known.get(id(client))
        if known is not None:
            return known[1]
        number, made = id(client), make()
        self._known[number] = ref(client, lambda _: self._known.pop(number, None)), made
        return made


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop; raise WrongContext if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongContext("no event loop is running here: use it inside a coroutine") from None


def is_client(value: object) -> bool:
    """Return whether it is a client of redis-py."""
    return isinstance(value, (Redis, RedisCluster))


def is_cluster(client: object) -> bool:
    """Return whether it is a client of a cluster."""
    return isinstance(client, RedisCluster)


def check_client(client: object) -> None:
    """Raise TypeError, which says what to pass instead, unless ``client`` is an asyncio client of redis-py."""
    if isinstance(client, (Redis, RedisCluster)) and not isinstance(client, Pipeline):
        return
    if type(client).__module__.startswith(("redis.client", "redis.cluster", "valkey.client", "valkey.cluster")):
        raise TypeError(
            f"{type(client).__name__} from {type(client).__module__} is a synchronous client: "
            "pass a redis.asyncio.Redis or RedisCluster"
        )
    if isinstance(client, (list, tuple, set)):
        raise TypeError(
            f"expected one client, not {len(client)}: only AsyncRedlock uses several servers. A semaphore cannot: a "
            "majority for each permit would not bound how many permits are held in all"
        )
    if isinstance(client, (str, bytes)):
        raise TypeError(
            "Coordinator takes a client, not an address: for an address use Coordinator.from_url(...), and pass that "
            "coordinator to the classes of locks"
        )
    # Only the type: an object that stands for an address may show its password.
    raise TypeError(f"expected a redis.asyncio.Redis, a RedisCluster or a Coordinator, not {type(client).__name__}")


def _options(client: RedisClient) -> dict[str, Any]:
    options: dict[str, Any]
    options = client.connection_kwargs if isinstance(client, RedisCluster) else client.connection_pool.connection_kwargs
    return options


def address_of(client: RedisClient) -> str:
    """Return the address that ``client`` connects to, for messages; never its credentials."""
    if isinstance(client, RedisCluster):
        nodes = client.nodes_manager.startup_nodes
        return f"a cluster at {', '.join(list(nodes)[:3])}{', …' if len(nodes) > 3 else ''}"
    pool: Any = client.connection_pool
    options = _options(client)
    if (service := getattr(pool, "service_name", None)) is not None:
        where = f"{service!r} of Sentinel"
    elif (path := options.get("path")) is not None:
        where = f"unix:{path}"
    elif (shard := options.get("shard") or getattr(pool, "shard", None)) is not None:
        where = f"a cluster at {shard.cluster.nodes.seeds}"
    else:
        where = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{where}, db {options['db']}" if options.get("db") else where


def uses_tls(client: RedisClient) -> bool:
    """Return whether ``client`` connects with TLS."""
    if isinstance(client, RedisCluster):
        return bool(client.connection_kwargs.get("ssl"))
    return issubclass(client.connection_pool.connection_class, SSLConnection)


def response_timeout_of(client: RedisClient, given: Seconds | None) -> float:
    """Return the seconds that a reply may take."""
    if given is not None:
        return positive_seconds(given, "response_timeout")
    configured = _options(client).get("socket_timeout")
    return float(configured) if configured else DEFAULT_TIMEOUT


def connect_timeout_of(client: RedisClient, response_timeout: float) -> float:
    """Return the seconds that connecting may take."""
    configured = _options(client).get("socket_connect_timeout")
    return float(configured) if configured else response_timeout


def health_check_interval_of(client: RedisClient) -> float:
    """Return the seconds without an answer after which the client checks a connection before its use; inf: never."""
    return float(_options(client).get("health_check_interval") or math.inf)


def encode(client: RedisClient, value: Name, what: str) -> bytes:
    """Return a name or identity as bytes; text in the client's own encoding, as other Redis locks encode it."""
    if isinstance(value, str):
        untyped: Any = client
        value = untyped.get_encoder().encode(value)
    if not isinstance(value, bytes):
        raise TypeError(f"{what} must be str or bytes, not {shown(value)}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    return value


# -- The number of retries of a command, and the time for them -------------------------------------------------


RETRY_FOR = 10.0
"""Seconds for which a command is retried while Redis is unreachable, unless the caller sets another limit."""

RETRY = Backoff(initial=0.01, cap=0.5)
"""Pauses between attempts where no link reconnects by itself."""

MIN_ATTEMPT = 0.05
"""Minimum seconds per attempt, even past the deadline: an interrupted attempt has an unknown outcome."""

AFTER_CONFLICT = Backoff(initial=0.0005, cap=0.02)
"""Pauses between attempts after a watched key was changed."""
