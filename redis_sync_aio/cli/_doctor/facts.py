"""The answers of servers about themselves and the rights of a user, and the commands that ask for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from redis_sync_aio._core.keys import INBOX_PREFIX, LockKeys, lock_keys
from redis_sync_aio._inspection.views import compiled, sample

from .._session import Session, try_to_connect

# -- Judge which names a user may lock, by the patterns of the keys that it may use. Nothing here asks ---------


EXAMPLE = "orders:"
"""The beginning of names for a user that may use no key."""


@dataclass(frozen=True, slots=True)
class KeyRights:
    """The names that a user may lock."""

    names: Sequence[str]
    """Patterns of them; "*": all."""
    keys: Sequence[str]
    """Patterns of the keys that it may use."""
    lacking: Sequence[str] = ()
    """Patterns of the keys that it lacks, if it may lock nothing."""


def key_rights(patterns: Sequence[str], prefix: str) -> KeyRights:
    """Return the names that a user may lock who may use keys like ``patterns``. ``prefix``: that of its coordinators.

    Which names locks have is not known, so each pattern stands for one name that it matches.
    """
    allowed = [compiled(pattern.encode()) for pattern in patterns]

    def lacking(name: str) -> list[str]:
        """Return the patterns of the keys that a lock of this name needs, and that are not allowed."""
        instance = sample(name.encode())
        if instance is None:
            return [name]
        keys = lock_keys(instance, prefix.encode())
        needed = zip(_patterns(keys, instance, name), (keys.all[:1], keys.all[1:]), strict=True)
        return [one for one, them in needed if not all(any(it.fullmatch(key) for it in allowed) for key in them)]

    if "*" in patterns or (prefix and not lacking("*")):
        return KeyRights(["*"], patterns)
    candidates = [names for pattern in patterns if (names := list(_names(pattern, prefix)))]
    usable = dict.fromkeys(name for names in candidates for name in names if not lacking(name))
    if usable:
        around = {f"{{{name}}}:*" for name in usable}
        return KeyRights([name for name in usable if name not in around], patterns)
    if candidates:
        found = [one for names in candidates for one in lacking(names[0])]
    else:
        found = [f"{prefix}*"] if prefix else lacking(f"{EXAMPLE}*")
    return KeyRights([], patterns, list(dict.fromkeys(found)))


def _names(pattern: str, prefix: str) -> Iterator[str]:
    """Iterate over the patterns of names that keys like ``pattern`` may belong to."""
    if not pattern.startswith(prefix):
        return
    rest = pattern.removeprefix(prefix)
    if rest and (not rest.startswith("{") or rest.count("{") == rest.count("}")):
        yield rest
    if rest.startswith("{") and (inside := rest[1:].partition("}")[0]):
        yield inside


def _patterns(keys: LockKeys, instance: bytes, name: str) -> tuple[str, str]:
    """Return the pattern of the key of a lock, and that of the keys around it. ``instance``: a name like ``name``."""
    key, around = keys.all[0], keys.queue.removesuffix(b"queue") + b"*"
    both = [it.rpartition(instance) for it in (key, around)]
    first, second = (f"{before.decode()}{name}{after.decode()}" for before, _, after in both)
    return first, second


SETTINGS = (
    "min-replicas-to-write",
    "min-replicas-max-lag",
    "appendfsync",
    "save",
    "stop-writes-on-bgsave-error",
    "timeout",
    "tcp-keepalive",
    "maxclients",
    "client-output-buffer-limit",
    "notify-keyspace-events",
    "repl-ping-replica-period",
    "cluster-require-full-coverage",
)
"""Names that CONFIG GET is asked for, one by one; what INFO tells is not needed."""


SLOTS = 16384
SMALL = 1 << 20
"""Bytes: a smaller buffer of a subscriber may overflow in a burst of grants."""


class Refused(str):
    """An answer that is an error: the reason that the server, or its ACL, does not allow the question."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The answers of one server."""

    where: str
    info: Mapping[str, Any]
    """The reply to INFO; empty if it may not be asked."""
    settings: Mapping[str, str]
    """The reply to CONFIG GET; empty if it may not be asked."""
    latency: float | None = None
    """Seconds that a command takes, the median of some; None if TIME may not be asked."""
    ahead: float | None = None
    """Seconds that the clock of the server is ahead of this machine's, at least; negative: behind; None: as above."""
    slowest: tuple[str, float] = ("", 0.0)
    """The slowest command of the last hour, without its arguments, and its seconds."""
    cluster: Mapping[str, str] = field(default_factory=dict)
    """The reply to CLUSTER INFO; empty if it is no cluster."""
    nodes: Sequence[Sequence[str]] = ()
    """The reply to CLUSTER NODES: the words of each line."""

    def number(self, name: str) -> int | None:
        """Return a number of INFO; None if it is not there."""
        value = self.info.get(name)
        return int(value) if isinstance(value, (int, float)) else None

    def count(self, name: str) -> int:
        """Return a number of INFO; 0 if it is not there."""
        return self.number(name) or 0

    def setting(self, name: str) -> int | None:
        """Return a setting that is a number; None if it cannot be read."""
        value = self.settings.get(name, "")
        return int(value) if value.lstrip("-").isdigit() else None

    @property
    def version(self) -> str:
        """Name and version of the server; empty if it does not tell."""
        name = "Valkey" if "valkey_version" in self.info else "Redis"
        number = str(self.info.get("valkey_version") or self.info.get("redis_version", ""))
        return f"{name} {number}" if number else ""

    @property
    def release(self) -> tuple[int, ...]:
        """The first two numbers of the version."""
        return tuple(int(part) for part in self.version.split()[-1].split(".")[:2] if part.isdigit())

    @property
    def is_replica(self) -> bool:
        """True if it follows another server."""
        return self.info.get("role") in ("slave", "replica")

    @property
    def has_writes(self) -> bool:
        """True if it takes writes, as far as it tells."""
        return self.number("connected_slaves") is not None and not self.is_replica

    @property
    def primary(self) -> str:
        """Address of the primary of a replica."""
        return f"{self.info.get('master_host')}:{self.info.get('master_port')}"

    @property
    def policy(self) -> str | None:
        """The maxmemory-policy; None if it is not readable."""
        return self.info.get("maxmemory_policy")

    @property
    def most_clients(self) -> int:
        """Number of clients that may connect; 0: not known."""
        return self.number("maxclients") or self.setting("maxclients") or 0

    @property
    def buffer(self) -> int | None:
        """Bytes of the smallest limit of a subscriber's buffer; None if it is not readable."""
        words = self.settings.get("client-output-buffer-limit", "").split()
        if "pubsub" not in words:
            return None
        limits = [int(word) for word in words[words.index("pubsub") + 1 :][:2]]
        return min(filter(None, limits), default=SMALL)

    @property
    def fsync(self) -> str | None:
        """The setting appendfsync; None if it is not readable."""
        return self.settings.get("appendfsync")

    @property
    def failed_writes(self) -> list[str]:
        """Writes to the disk that failed, so that the server refuses commands."""
        saves = self.settings.get("save", "") != "" and self.settings.get("stop-writes-on-bgsave-error") == "yes"
        save = ["save"] if saves and self.info.get("rdb_last_bgsave_status", "ok") != "ok" else []
        append = self.info.get("aof_last_write_status", "ok") != "ok"
        return [*save, *(["write to the append-only file"] if append else [])]

    @property
    def pings(self) -> int:
        """Seconds between two signs of life of a primary to its replicas."""
        return self.setting("repl-ping-replica-period") or 10

    @property
    def needed_replicas(self) -> int | None:
        """Number of replicas without which a primary refuses writes; None if it cannot be read."""
        # Either of the two settings turns the check off if it is 0.
        return 0 if self.setting("min-replicas-max-lag") == 0 else self.setting("min-replicas-to-write")

    @property
    def good_replicas(self) -> int:
        """Number of replicas that are in time."""
        good = self.number("min_slaves_good_slaves")
        replicas = [it for name, it in self.info.items() if name.startswith("slave") and isinstance(it, dict)]
        return sum(it.get("state") == "online" for it in replicas) if good is None else good

    @property
    def lost_slots(self) -> int:
        """Number of slots without a primary."""
        assigned, failing = (int(self.cluster.get(f"cluster_slots_{it}", 0)) for it in ("assigned", "fail"))
        return SLOTS - assigned + failing

    @property
    def _own(self) -> Sequence[str]:
        return next((words for words in self.nodes if len(words) > 2 and "myself" in words[2]), [])

    @property
    def moving(self) -> int:
        """Number of slots that are half moved."""
        return sum(word.startswith("[") for word in self._own[8:])

    @property
    def is_alone(self) -> bool:
        """True if the shard has no replica."""
        own = self._own
        return bool(own) and not any(
            words[3] == own[0] and "fail" not in words[2] for words in self.nodes if len(words) > 3
        )


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of the user of this connection. Reasons are empty if there is nothing to explain."""

    user: str = ""
    scripts: str = ""
    """The reason that scripts cannot be called."""
    commands_known: bool = False
    """True if the server said which commands are allowed."""
    missing: Sequence[str] = ()
    """Commands that scripts use, and that the user may not run."""
    keys: KeyRights | None = None
    """The names that its locks may have; None: not known."""
    resp3: str = ""
    """The reason that there is no RESP3."""
    push: str = ""
    """The reason that no message of a channel arrives."""
    listeners: int = 1
    """Number of connections that got a message of a channel that only this program knows."""
    prefix: str = ""
    """The prefix of the channels."""

    @property
    def no_scripts(self) -> bool:
        """True if no user may call scripts."""
        return "unknown command" in self.scripts.lower()

    @property
    def names(self) -> Sequence[str]:
        """Patterns of the names that its locks may have."""
        return () if self.keys is None else self.keys.names


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The answers of one sentinel."""

    where: str
    service: Mapping[str, str]
    """The reply to SENTINEL MASTER; empty if there was none."""
    quorum: str = ""
    """The reason that a failover is not possible now; empty if one is."""
    replicas: Sequence[Mapping[str, str]] = ()
    """The reply to SENTINEL REPLICAS."""
    others: Sequence[Mapping[str, str]] = ()
    """The reply to SENTINEL SENTINELS."""
    announced: bool = False
    """True if only other sentinels name it; it is not in the address."""


# -- Ask servers about themselves. Every command here only reads; a refused one is an answer, too --------------


Ask: TypeAlias = Callable[..., Awaitable[Any]]
"""Sends a command to one server; returns its answer, or `Refused`."""
SAMPLES = 21
RECENT = 3600


def asking(client: Redis | RedisCluster, **options: Any) -> Ask:
    """Return how to ask the server of ``client``; ``options`` are those of its ``execute_command``."""
    untyped: Any = client

    async def ask(*words: Any) -> Any:
        try:
            return await untyped.execute_command(*words, **options)
        except ResponseError as error:
            return Refused(str(error).rstrip(".") or type(error).__name__)

    return ask


def servers(session: Session) -> dict[str, Ask]:
    """Return how to ask each server that grants locks, by its address."""
    client = session.client
    if isinstance(client, RedisCluster):
        return {str(node.name): asking(client, target_nodes=node) for node in client.get_primaries()}
    return {session.address.shown: asking(client)}


async def facts_of(where: str, ask: Ask) -> Facts:
    """Return the facts that a server reports about itself."""
    info = await ask("INFO")
    info = {} if isinstance(info, Refused) else info
    latency, ahead = await _clock(ask)
    nodes: Any = await ask("CLUSTER", "NODES") if info.get("cluster_enabled") else ""
    return Facts(
        where,
        info,
        await _settings(ask),
        latency,
        ahead,
        await _slowest(ask),
        _pairs(await ask("CLUSTER", "INFO")) if nodes else {},
        [] if isinstance(nodes, Refused) else [line.split() for line in nodes.splitlines()],
    )


async def _settings(ask: Ask) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SETTINGS:
        answer = await ask("CONFIG GET", name)
        if isinstance(answer, Refused):
            return found
        found |= {str(key): str(value) for key, value in answer.items()}
    return found


async def _clock(ask: Ask) -> tuple[float | None, float | None]:
    """Return the seconds of a round trip, and how far the server's clock is ahead, by the fastest of some.

    Both are None if TIME may not be asked.
    """
    trips: list[tuple[float, float]] = []
    for _ in range(SAMPLES):
        began, by_the_clock = time.monotonic(), time.time()
        answer = await ask("TIME")
        took = time.monotonic() - began
        if not isinstance(answer, Refused):
            trips.append((took, int(answer[0]) + int(answer[1]) / 1e6 - by_the_clock - took / 2))
    if not trips:
        return None, None
    took, ahead = min(trips)
    certain = max(0.0, abs(ahead) - took / 2)
    return median(took for took, _ in trips), certain if ahead > 0 else -certain


async def _slowest(ask: Ask) -> tuple[str, float]:
    """Return the slowest command of the last hour, without its arguments, which may be secret."""
    entries, now = await ask("SLOWLOG", "GET", 128), await ask("TIME")
    if isinstance(entries, Refused) or isinstance(now, Refused):
        return "", 0.0
    recent = [entry for entry in entries if int(entry[1]) > int(now[0]) - RECENT and entry[3]]
    found = [(int(entry[2]) / 1e6, str(entry[3][0]).upper()) for entry in recent]
    seconds, name = max(found, default=(0.0, ""))
    return name, seconds


def _pairs(answer: Any) -> dict[str, str]:
    """Return the "name:value" lines of an answer."""
    if isinstance(answer, Refused):
        return {}
    return dict(line.split(":", 1) for line in text(answer).splitlines() if ":" in line)


def text(word: Any) -> str:
    """Return a word of an answer as text."""
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


# -- The rights of the user of the connection, found out without writing anything ------------------------------


KEY = "redis-sync-aio:doctor"
COMMANDS: dict[str, tuple[Any, ...]] = {
    "GET": (KEY,),
    "SET": (KEY, ""),
    "DEL": (KEY,),
    "PTTL": (KEY,),
    "PEXPIRE": (KEY, 1),
    "TIME": (),
    "ZADD": (KEY, 1, ""),
    "ZREM": (KEY, ""),
    "ZRANGE": (KEY, 0, 0),
    "ZSCORE": (KEY, ""),
    "ZCARD": (KEY,),
    "HMGET": (KEY, ""),
    "HGET": (KEY, ""),
    "HSET": (KEY, "", ""),
    "HDEL": (KEY, ""),
    "ZRANGEBYSCORE": (KEY, 0, 0),
    "ZREMRANGEBYRANK": (KEY, 0, 0),
}
"""The commands in the scripts of locks, semaphores and so on, with arguments for ACL DRYRUN."""
UNKNOWN = "0" * 40
"""The digest of no script: the server answers a user that may call scripts that there is none, and does nothing."""


async def rights_of(session: Session, ask: Ask) -> Rights:
    """Return the rights of the user."""
    called = await ask("EVALSHA", UNKNOWN, 0)
    may_call = any(it in str(called).lower() for it in ("noscript", "no matching script"))
    scripts = called if isinstance(called, Refused) and not may_call else ""
    if scripts and not isinstance(await ask("EVAL", "return 0", 0), Refused):
        scripts = ""  # they are sent in full
    user = await ask("ACL", "WHOAMI")
    user = "" if isinstance(user, Refused) else str(user)
    missing = await _missing(user, ask) if user else None
    resp3, push, listeners = await _push(session, ask)
    keys = await _keys(user, ask, session.prefix) if user else None
    known = missing is not None
    return Rights(user, scripts, known, missing or [], keys, resp3, push, listeners, session.prefix)


async def _missing(user: str, ask: Ask) -> list[str] | None:
    """Return the commands that are not allowed; None if the server does not tell."""
    found: list[str] = []
    for name, arguments in COMMANDS.items():
        answer = await ask("ACL", "DRYRUN", user, name, *arguments)
        if isinstance(answer, Refused):
            return None
        if "command" in str(answer):  # else it is OK, or it is about the key, and locks may have other names
            found.append(name)
    return found


async def _keys(user: str, ask: Ask, prefix: str) -> KeyRights | None:
    """Return which names may be locked; None if the server does not tell, or if what it tells is not simple."""
    answer = await ask("ACL", "GETUSER", user)
    about = {} if isinstance(answer, Refused) else dict(zip(answer[::2], answer[1::2], strict=False))
    if "keys" not in about or about.get("selectors"):
        return None
    words = about["keys"] if isinstance(about["keys"], list) else about["keys"].split()  # a list before Redis 7
    patterns = [word.removeprefix("%RW").removeprefix("~") for word in words if not word.startswith(("%R~", "%W~"))]
    return key_rights(patterns, prefix)


async def _push(session: Session, ask: Ask) -> tuple[str, str, int]:
    """Subscribe to a channel of our own, publish there, and count who gets it, as the link of locks does."""
    channel = session.prefix + (INBOX_PREFIX + secrets.token_hex(8).encode()).decode()
    async with session.another_client(protocol=3) as client:
        try:
            await try_to_connect(client)
        except RedisError as error:
            return str(error).rstrip("."), "", 1
        async with client.pubsub() as pubsub:
            try:
                await pubsub.subscribe(channel)
                await pubsub.get_message(timeout=session.response_timeout)
            except ResponseError as error:
                return "", str(error).rstrip("."), 1
            published = await ask("PUBLISH", channel, "")
            if isinstance(published, Refused):
                return "", published, 1
            if await pubsub.get_message(timeout=session.response_timeout) is None:
                return "", "a message that was published did not arrive", 1
            return "", "", int(published)


# -- Ask sentinels about the service, each other and its replicas, and the replicas about themselves -----------


SILENT = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError)
"""The errors that a server raises by not answering."""


async def sentinel_facts(session: Session) -> list[SentinelFacts]:
    """Return the facts about the service that each sentinel of the address, and each that these announce, reports."""
    found: list[SentinelFacts] = []
    for (host, port), client in zip(session.address.hosts, session.sentinels, strict=False):
        found.append(await _about_service(f"{host}:{port}", asking(client), session.address.service))
    known = {one.where for one in found}
    for where, number in _announced(it for one in found for it in one.others):
        if f"{where}:{number}" not in known and session.sentinel_at is not None:
            async with session.sentinel_at(where, number) as client:
                ask = asking(client)
                found.append(await _about_service(f"{where}:{number}", ask, session.address.service, announced=True))
    return found


async def _about_service(where: str, ask: Ask, service: str, announced: bool = False) -> SentinelFacts:
    try:
        quorum = await ask("SENTINEL", "CKQUORUM", service)
        return SentinelFacts(
            where,
            _described(await ask("SENTINEL", "MASTER", service)),
            quorum if isinstance(quorum, Refused) and "NOQUORUM" in quorum else "",
            _each_described(await ask("SENTINEL", "REPLICAS", service)),
            _each_described(await ask("SENTINEL", "SENTINELS", service)),
            announced,
        )
    except SILENT:
        return SentinelFacts(where, {}, announced=announced)


async def replica_facts(session: Session, sentinels: Sequence[SentinelFacts]) -> dict[str, Facts | None]:
    """Return the facts that each replica reports about itself, by its address; None: it does not answer."""
    found: dict[str, Facts | None] = {}
    async for where, ask in _replicas(session, sentinels):
        try:
            found[where] = await facts_of(where, ask)
        except SILENT:
            found[where] = None
    return found


async def _replicas(session: Session, sentinels: Sequence[SentinelFacts]) -> AsyncIterator[tuple[str, Ask]]:
    if isinstance(session.client, RedisCluster):
        for node in session.client.get_replicas():
            yield str(node.name), asking(session.client, target_nodes=node)
    for host, port in _announced(it for one in sentinels for it in one.replicas):
        if session.server_at is not None:
            async with session.server_at(host, port) as client:
                yield f"{host}:{port}", asking(client)


def _announced(found: Iterable[Mapping[str, str]]) -> list[tuple[str, int]]:
    """Return the addresses that sentinels know, each once."""
    return sorted({(it["ip"], int(it["port"])) for it in found if "ip" in it and "port" in it})


def _described(answer: Any) -> dict[str, str]:
    """Return the names and values of an answer, which alternate in it."""
    words = [] if isinstance(answer, Refused) else [text(word) for word in answer]
    return dict(zip(words[::2], words[1::2], strict=False))


def _each_described(answer: Any) -> list[dict[str, str]]:
    return [] if isinstance(answer, Refused) else [_described(one) for one in answer]
