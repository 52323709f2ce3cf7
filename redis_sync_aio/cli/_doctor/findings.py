"""The findings of the doctor: a table of rows (facts -> level, what was found, what it means, how to fix it)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar

from redis_sync_aio._core.keys import INBOX_PREFIX
from redis_sync_aio.errors._base import page

from .._session import counted
from .facts import EXAMPLE, SMALL, Facts, Rights, SentinelFacts

F = TypeVar("F")
Level: TypeAlias = Literal["ok", "unknown", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warn", "bad")
"""From harmless to harmful; "unknown": it could not be read."""

OLDEST = (6, 2)
NEAR = 0.85
"""The part of a limit from which on the doctor warns."""
SHORT = 60
"""Seconds: a shorter ``timeout`` closes connections that are in use."""
SLOW = 0.01
"""Seconds: a slower round trip is felt at every lock."""
BLOCKED = 0.1
"""Seconds: a command that takes longer delays renewals and hand-overs."""
APART = 1.0
"""Seconds that clocks may differ."""
CLOSE = 1
"""Seconds: min-replicas-max-lag that keeps two primaries from granting the same lock."""
ENOUGH = 3
"""Fewest sentinels that survive the loss of one."""
HASTY, LATE = 1000, 30_000
"""Milliseconds of silence: a primary that counts as dead sooner is often alive; later, leases have ended by then."""
BEHIND = 3
"""Seconds, on top of the interval of its pings, since a replica last had a sign of life from its primary."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, what that means for locks, and how to change it."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    fix: str = ""
    where: str = ""
    """Which of several servers; empty if there is one."""


@dataclass(frozen=True, slots=True)
class Row(Generic[F]):
    """A row of the table: a finding, and the facts about which it is made."""

    check: str
    level: Level
    when: Callable[[F], object]
    found: str | Callable[[F], str]
    meaning: str | Callable[[F], str] = ""
    fix: str | Callable[[F], str] = ""


def judge(table: Iterable[Row[F]], facts: F, where: str = "") -> Iterator[Finding]:
    """Yield a finding for each check: the first of its rows that is true of the facts."""
    made: set[str] = set()
    for row in table:
        if row.check not in made and row.when(facts):
            made.add(row.check)
            found, meaning, fix = (it if isinstance(it, str) else it(facts) for it in (row.found, row.meaning, row.fix))
            yield Finding(row.check, row.level, found, meaning, fix, where)


def always(_facts: object) -> bool:
    """Return True: the last row of a check."""
    return True


def unreadable(what: str) -> str:
    """Return the finding for a user, or a service, that does not show something."""
    return f"{what} is not readable for this user, or not offered by this service"


def lowered(text: str) -> str:
    """Return a sentence as the rest of another one."""
    return text[0].lower() + text[1:]


def _replicas(count: int) -> str:
    return counted(count, "replica")


# -- One server ------------------------------------------------------------------------------------------------

_EVICTED = "Held locks have a ttl and may be evicted, and then two clients hold one."
_NO_EVICTION = "CONFIG SET maxmemory-policy noeviction, or keep locks on a server of their own"
_FULL = "At maxmemory nothing can be acquired (OutOfMemory); held locks are still renewed and released."
_ROOM = "raise maxmemory, or keep locks on a server of their own"
_TWO_PRIMARIES = "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 1 on all servers"


def _usage(facts: Facts) -> str:
    used, limit = facts.count("used_memory"), facts.count("maxmemory")
    return f"{used / limit:.0%} of maxmemory is used ({used / 1e6:,.0f} of {limit / 1e6:,.0f} MB)"


def _clients(facts: Facts) -> str:
    used = facts.count("connected_clients")
    return f"{used:,} of {facts.most_clients:,} clients (maxclients) {'is' if used == 1 else 'are'} connected"


def _writing(facts: Facts) -> str:
    """Return the setting that says how many replicas a primary needs."""
    off = facts.setting("min-replicas-max-lag") == 0
    return "min-replicas-max-lag is 0" if off else f"min-replicas-to-write is {facts.needed_replicas}"


def _copies(facts: Facts) -> str:
    return f"{_replicas(facts.count('connected_slaves'))}, {_writing(facts)}"


def _apart(facts: Facts) -> str:
    ahead = facts.ahead or 0
    return f"the server's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"


def _round_trip(facts: Facts) -> str:
    return f"a round trip takes {(facts.latency or 0) * 1000:.1f} ms (median)"


# fmt: off
PROMOTED: tuple[Row[Facts], ...] = (
    Row("eviction", "unknown", lambda f: f.policy is None or f.number("maxmemory") is None,
        unreadable("maxmemory-policy")),
    Row("eviction", "ok", lambda f: f.policy == "noeviction", "maxmemory-policy is noeviction"),
    Row("eviction", "bad", lambda f: f.count("maxmemory"), lambda f: f"maxmemory-policy is {f.policy}",
        _EVICTED, _NO_EVICTION),
    Row("eviction", "warn", always, lambda f: f"maxmemory-policy is {f.policy}, but there is no maxmemory",
        f"Once maxmemory is set: {lowered(_EVICTED)}", _NO_EVICTION),
    Row("timeout", "warn", lambda f: 0 < (f.setting("timeout") or 0) < SHORT,
        lambda f: f"timeout is {f.setting('timeout')} s",
        "Connections that are silent for so long are closed, those of transactions and of polling waiters too.",
        "CONFIG SET timeout 0"),
    Row("timeout", "ok", lambda f: f.setting("timeout") is not None, lambda f: f"timeout is {f.setting('timeout')}"),
    Row("keepalive", "warn", lambda f: f.setting("tcp-keepalive") == 0, "tcp-keepalive is 0",
        "The server does not notice that a machine is gone, so its waiters are still granted locks.",
        "CONFIG SET tcp-keepalive 60"),
    Row("keepalive", "ok", lambda f: f.setting("tcp-keepalive"),
        lambda f: f"tcp-keepalive is {f.setting('tcp-keepalive')}"),
    Row("buffers", "warn", lambda f: f.buffer is not None and f.buffer < SMALL,
        lambda f: f"client-output-buffer-limit of subscribers (pubsub) is {f.buffer:,} bytes",
        "A burst of grants to a busy process closes its connection, and its waiters lose their place.",
        'CONFIG SET client-output-buffer-limit "pubsub 32mb 8mb 60"'),
    Row("buffers", "ok", lambda f: f.buffer is not None, "client-output-buffer-limit leaves subscribers enough room"),
    Row("persistence", "unknown", lambda f: f.number("aof_enabled") is None, unreadable("appendonly")),
    Row("persistence", "bad", lambda f: f.failed_writes, lambda f: f"the last {' and '.join(f.failed_writes)} failed",
        "The server refuses all writes (MISCONF), so no lock can be acquired or renewed.",
        "see the server's log, and give it disk space and rights to its directory"),
    Row("persistence", "unknown", lambda f: f.count("aof_enabled") and f.fsync is None,
        "appendonly is yes, but appendfsync is not readable"),
    Row("persistence", "ok", lambda f: f.count("aof_enabled") and f.fsync != "no",
        lambda f: f"appendonly is yes, appendfsync {f.fsync}"),
    Row("persistence", "warn", always,
        lambda f: "appendfsync is no" if f.count("aof_enabled") else "appendonly is no",
        "A restart loses grants: others can acquire a lock until its holder notices at its next renewal.",
        "CONFIG SET appendonly yes and appendfsync always, or check fences where the data is written"),
)
"""The rows that matter for a replica, too, as it may be promoted."""

SERVER: tuple[Row[Facts], ...] = (
    Row("version", "unknown", lambda f: not f.version, unreadable("INFO")),
    Row("version", "bad", lambda f: f.release < OLDEST, lambda f: f.version,
        "Scripts of this package use commands that it does not have.",
        "upgrade to Redis 6.2 or newer, or to Valkey"),
    Row("version", "ok", always, lambda f: f.version),
    Row("role", "bad", lambda f: "sentinel" in (f.info.get("redis_mode"), f.info.get("server_mode")),
        "this is a sentinel, not the server that it watches",
        "It has no data, so no lock can be acquired here.",
        lambda f: f"name it as such: redis+sentinel://{f.where}/SERVICE"),
    Row("role", "bad", lambda f: f.is_replica, lambda f: f"this server is a replica of {f.primary}",
        "It refuses writes, so no lock can be acquired here.",
        lambda f: f"connect to {f.primary}, or let Sentinel name the primary (redis+sentinel://)"),
    Row("role", "ok", lambda f: f.info, "it is a primary"),
    *PROMOTED,
    Row("memory", "ok", lambda f: f.number("used_memory") is not None and f.number("maxmemory") == 0,
        lambda f: f"{f.count('used_memory') / 1e6:,.0f} MB are used, and there is no maxmemory"),
    Row("memory", "bad", lambda f: 0 < f.count("maxmemory") <= f.count("used_memory"), _usage, _FULL, _ROOM),
    Row("memory", "warn", lambda f: 0 < NEAR * f.count("maxmemory") <= f.count("used_memory"), _usage, _FULL, _ROOM),
    Row("memory", "ok", lambda f: f.number("used_memory") is not None and f.count("maxmemory"), _usage),
    Row("clients", "warn", lambda f: 0 < NEAR * f.most_clients <= f.count("connected_clients"), _clients,
        "When a connection is lost then, it may not be opened again in time to renew leases.",
        "CONFIG SET maxclients to more, or close idle clients"),
    Row("clients", "ok", lambda f: f.most_clients and f.number("connected_clients") is not None, _clients),
    Row("events", "ok", lambda f: f.settings.get("notify-keyspace-events"),
        lambda f: f"notify-keyspace-events is {f.settings['notify-keyspace-events']}",
        "Each command of a lock publishes events, too, which takes the server some time.",
        "CONFIG SET notify-keyspace-events '', unless a program needs them"),
    Row("settings", "unknown", lambda f: not f.settings,
        unreadable("CONFIG (replicas, persistence, timeout, keepalive, buffers)")),
    Row("replicas", "unknown", lambda f: f.has_writes and f.needed_replicas is None,
        lambda f: f"{_replicas(f.count('connected_slaves'))}; min-replicas-to-write is not readable"),
    Row("replicas", "bad", lambda f: f.has_writes and (f.needed_replicas or 0) > f.good_replicas,
        lambda f: f"{_writing(f)}, and {_replicas(f.good_replicas)} {'is' if f.good_replicas == 1 else 'are'} in time",
        "The server refuses all writes (NOREPLICAS), so no lock can be acquired or renewed.",
        lambda f: f"bring the replicas back; until then CONFIG SET min-replicas-to-write {f.good_replicas}"),
    Row("replicas", "warn", lambda f: f.has_writes and f.count("connected_slaves") and not f.needed_replicas,
        lambda f: f"{_replicas(f.count('connected_slaves'))}, and {_writing(f)}",
        "A primary that is cut off keeps granting locks that the new primary grants, too.",
        lambda f: _TWO_PRIMARIES if f.count("connected_slaves") > 1 else
        f"add a second replica, then {_TWO_PRIMARIES}. With a single one, its restart would stop all locks"),
    Row("replicas", "warn",
        lambda f: f.has_writes and f.needed_replicas and (f.setting("min-replicas-max-lag") or 0) > CLOSE,
        lambda f: f"min-replicas-max-lag is {f.setting('min-replicas-max-lag')} s",
        "For so long an old primary grants locks that the new primary grants, too.",
        "CONFIG SET min-replicas-max-lag 1 on all servers"),
    Row("replicas", "ok",
        lambda f: f.has_writes and f.needed_replicas and f.count("connected_slaves") == f.needed_replicas, _copies,
        lambda f: f"While {'the only one' if f.needed_replicas == 1 else 'any of them'} is down or restarts, "
        "the server refuses all writes: no lock is acquired or renewed.",
        "add a replica"),
    Row("replicas", "ok", lambda f: f.has_writes, _copies),
    Row("clock", "unknown", lambda f: f.ahead is None, unreadable("TIME")),
    Row("clock", "ok", lambda f: abs(f.ahead or 0) <= APART, "the server's clock agrees with this machine's"),
    Row("clock", "warn", always, _apart,
        "Leases do not depend on it, but fences are times of the server: after a failover they may jump or stall.",
        "run NTP (chrony) on the server and here"),
    Row("latency", "unknown", lambda f: f.latency is None, unreadable("TIME")),
    Row("latency", "ok", lambda f: (f.latency or 0) <= SLOW, _round_trip),
    Row("latency", "warn", always, _round_trip,
        "Each acquire, release and hand-over takes at least as long.",
        "run close to the server; look at its load and at proxies"),
    Row("blocked", "warn", lambda f: f.slowest[1] > BLOCKED,
        lambda f: f"in the last hour {f.slowest[0]} blocked the server for {f.slowest[1] * 1000:,.0f} ms",
        "Renewals and hand-overs wait as long; a lease shorter than that is lost.",
        lambda f: f"see SLOWLOG GET; avoid {f.slowest[0]}, or run it on another server"),
    Row("slots", "bad", lambda f: f.cluster and f.lost_slots,
        lambda f: f"{f.lost_slots:,} of 16,384 slots {'has' if f.lost_slots == 1 else 'have'} no primary",
        lambda f: f"Locks whose names hash to {'it' if f.lost_slots == 1 else 'them'} cannot be acquired.",
        "redis-cli --cluster check, then --cluster fix"),
    Row("cluster", "bad", lambda f: f.cluster and f.cluster.get("cluster_state") != "ok", "cluster_state is not ok",
        "The nodes refuse commands (CLUSTERDOWN), so no lock can be acquired or renewed.",
        "bring the failed nodes or slots back"),
    Row("cluster", "ok", lambda f: f.cluster, "cluster_state is ok"),
    Row("coverage", "warn", lambda f: f.cluster and f.settings.get("cluster-require-full-coverage") == "yes",
        "cluster-require-full-coverage is yes",
        "When one shard has no primary, the locks of all shards are unreachable.",
        "CONFIG SET cluster-require-full-coverage no on all nodes"),
    Row("moving", "warn", lambda f: f.cluster and f.moving,
        lambda f: f"{counted(f.moving, 'slot is', 'slots are')} half moved",
        lambda f: f"Locks whose names hash to {'it' if f.moving == 1 else 'them'} are renewed and released, "
        "but not granted.",
        "finish the move, or redis-cli --cluster fix"),
    Row("shard", "warn", lambda f: f.cluster and f.is_alone, "this shard has no replica",
        "When it dies, its locks are unreachable until it is back.", "add a replica to it"),
)
# fmt: on


def of_server(facts: Facts, where: str = "") -> Iterator[Finding]:
    """Yield the findings that follow from the facts about one server."""
    return judge(SERVER, facts, where)


# -- The rights of the user ------------------------------------------------------------------------------------

_RIGHTS = page("operations/servers", "rights")
_POLLING = "Waiters poll instead of being woken: hand-overs are later, and cost more commands."


def _whose(rights: Rights) -> str:
    return f"user {rights.user!r}" if rights.user else "this user"


def _allow(rights: Rights, allowed: str, note: str = "") -> str:
    """Return the command that gives the user these rights."""
    return f"ACL SETUSER {rights.user or 'USER'} {allowed} ({note}{_RIGHTS})"


def _allow_keys(rights: Rights) -> str:
    lacking = () if rights.keys is None else rights.keys.lacking
    note = f"for names that begin with {EXAMPLE}; " if f"{EXAMPLE}*" in lacking else ""
    return _allow(rights, " ".join(f"~{one}" for one in lacking), note)


def _all_keys(rights: Rights) -> str:
    return f"{_whose(rights)} may use all keys{f' that begin with {rights.prefix}' if rights.prefix else ''}"


def _few_keys(rights: Rights) -> str:
    keys = () if rights.keys is None else rights.keys.keys
    return f"{_whose(rights)} may use " + (f"{', '.join(keys)}, but not all keys of a lock" if keys else "no keys")


def _needed_keys(rights: Rights) -> str:
    around = "next to the key NAME, a lock has keys that begin with {NAME}"
    needed = f"all keys of the lock NAME begin with {rights.prefix}" if rights.prefix else around
    return f"Every lock raises PermissionDenied: {needed}."


# fmt: off
RIGHTS: tuple[Row[Rights], ...] = (
    Row("scripts", "ok", lambda r: not r.scripts, lambda r: f"{_whose(r)} may call scripts"),
    Row("scripts", "warn", always,
        lambda r: "scripts are disabled on this server" if r.no_scripts else f"{_whose(r)} may not call scripts",
        "Locks and semaphores decide with WATCH instead, in two to three round trips; nothing else works.",
        lambda r: 'choose a server with scripts, or say engine="watch" if you mean it' if r.no_scripts
        else _allow(r, "+evalsha +eval")),
    Row("commands", "bad", lambda r: r.missing, lambda r: f"{_whose(r)} may not run {', '.join(r.missing)}",
        "Locks, semaphores and all else that needs them raise PermissionDenied.",
        lambda r: _allow(r, " ".join(f"+{command.lower()}" for command in r.missing))),
    Row("commands", "ok", lambda r: r.commands_known, lambda r: f"{_whose(r)} may run all commands that locks need"),
    Row("commands", "unknown", always, "which commands are allowed is not readable (ACL DRYRUN)"),
    Row("keys", "unknown", lambda r: r.keys is None,
        lambda r: f"which keys {_whose(r)} may use is not readable (ACL GETUSER)"),
    Row("keys", "ok", lambda r: r.names == ["*"], _all_keys),
    Row("keys", "ok", lambda r: r.names, lambda r: f"{_whose(r)} may lock names like {', '.join(r.names)}",
        "A lock of another name raises PermissionDenied."),
    Row("keys", "bad", always, _few_keys, _needed_keys, _allow_keys),
    Row("push", "warn", lambda r: r.resp3, lambda r: f"RESP3 (HELLO 3) is refused: {r.resp3}", _POLLING,
        "connect without the proxy, or to a server from version 6 on"),
    Row("push", "warn", lambda r: r.push, lambda r: f"messages cannot be pushed: {r.push}", _POLLING,
        lambda r: _allow(r, f"+subscribe +publish &{r.prefix}{INBOX_PREFIX.decode()}*")),
    Row("push", "warn", lambda r: r.listeners > 1, lambda r: counted(
        r.listeners - 1, "other client receives", "other clients receive") + " the messages of every channel",
        "The server cannot tell that a waiter is dead, and so grants it locks that it never uses.",
        "end PSUBSCRIBE * of monitors and debuggers (CLIENT LIST, psub=)"),
    Row("push", "ok", always, "messages are pushed to waiters"),
)
# fmt: on


def of_rights(rights: Rights) -> Iterator[Finding]:
    """Yield whether the user may do what locks need."""
    return judge(RIGHTS, rights)


# -- Sentinels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Service:
    """The facts about a service: the answers of its sentinels, and the number of its replicas."""

    answered: Sequence[SentinelFacts]
    replicas: int = 0

    def number(self, name: str) -> int:
        """Return a number, as the first sentinel says."""
        return int(self.answered[0].service.get(name, 0))

    @property
    def total(self) -> int:
        """Number of sentinels."""
        return self.number("num-other-sentinels") + 1

    @property
    def refusal(self) -> str:
        """Reason that no failover is possible now; empty if one is."""
        return next((it.quorum for it in self.answered if it.quorum), "")

    @property
    def down_after(self) -> list[int]:
        """Milliseconds of silence after which the primary counts as dead, in order."""
        return sorted(int(it.service.get("down-after-milliseconds", 0)) for it in self.answered)

    @property
    def priorities(self) -> set[str]:
        """Priorities of the replicas."""
        return {it.get("slave-priority", "100") for one in self.answered for it in one.replicas}

    def differing(self, *names: str) -> str:
        """Return the value of each sentinel; empty if they agree. Several names are joined to an address."""
        values = [(":".join(str(it.service.get(name)) for name in names), it.where) for it in self.answered]
        different = len({value for value, _ in values}) > 1
        return ", ".join(f"{value} at {where}" for value, where in values) if different else ""


# fmt: off
SENTINEL: tuple[Row[SentinelFacts], ...] = (
    Row("sentinel", "warn", lambda s: not s.service and not s.announced, "it does not answer",
        "One sentinel fewer can agree on a failover, and clients wait for it when they connect.",
        "start it, or drop it"),
    Row("sentinel", "warn", lambda s: not s.service,
        "the others announce it at this address, where it does not answer",
        "One sentinel fewer can agree on a failover, and clients wait for it when they connect.",
        "start it, or set sentinel announce-ip and announce-port; if it is gone: SENTINEL RESET on the others"),
)
SERVICE: tuple[Row[Service], ...] = (
    Row("quorum", "bad", lambda s: s.refusal, lambda s: s.refusal,
        "When the primary dies no replica is promoted, and no lock can be acquired.",
        "bring sentinels back, or lower the quorum"),
    Row("quorum", "warn", lambda s: s.differing("quorum"),
        lambda s: f"the sentinels have different quorums: {s.differing('quorum')}",
        "Which failovers happen depends on which sentinel notices first that the primary is dead.",
        "SENTINEL SET … quorum: the same majority on all sentinels"),
    Row("quorum", "warn", lambda s: s.total < ENOUGH,
        lambda s: f"{counted(s.total, 'sentinel watches', 'sentinels watch')} the service",
        lambda s: "When its machine is lost, nothing fails over." if s.total == 1
        else "When the machine of one is lost, the other cannot fail over.",
        "run three sentinels, on three machines"),
    Row("quorum", "warn", lambda s: s.number("quorum") * 2 <= s.total,
        lambda s: f"the quorum is {s.number('quorum')} of {s.total}",
        "A minority may declare the primary dead; needless failovers lose grants.",
        "SENTINEL SET … quorum: a majority"),
    Row("quorum", "ok", always, lambda s: f"{s.total} sentinels, quorum {s.number('quorum')}"),
    Row("primary", "bad", lambda s: s.differing("ip", "port"),
        lambda s: f"the sentinels name different primaries: {s.differing('ip', 'port')}",
        "Clients use different servers, and both grant the same locks.",
        "wait for the end of a failover; if it stays so: SENTINEL RESET on those that are wrong"),
    Row("down-after", "warn", lambda s: 0 < s.down_after[0] < HASTY,
        lambda s: f"down-after-milliseconds is {s.down_after[0]}",
        "A short pause is a failover, which may lose grants.", "SENTINEL SET … down-after-milliseconds 5000"),
    Row("down-after", "warn", lambda s: s.down_after[0] and s.down_after[-1] >= LATE,
        lambda s: f"down-after-milliseconds is {s.down_after[-1]}",
        "When the primary dies, nothing is acquired or renewed for at least that long: shorter leases are lost.",
        "SENTINEL SET … down-after-milliseconds 5000"),
    Row("down-after", "ok", lambda s: s.down_after[0],
        lambda s: f"down-after-milliseconds is {s.down_after[-1]}"),
)
SUCCESSION: tuple[Row[Service], ...] = (
    Row("replica", "warn", lambda s: not s.replicas, "the service has no replica",
        "When the primary dies no server takes over, and no lock can be acquired until it is back.", "add a replica"),
    Row("replica", "bad", lambda s: s.priorities == {"0"}, "replica-priority of every replica is 0",
        "None of them is ever promoted: when the primary dies, no lock can be acquired until it is back.",
        "CONFIG SET replica-priority 100 on one that may become the primary"),
)
# fmt: on


def of_sentinels(found: Sequence[SentinelFacts]) -> Iterator[Finding]:
    """Yield whether the sentinels can fail over, agree with each other, and are where they say."""
    for one in found:
        yield from judge(SENTINEL, one, one.where)
    if answered := [one for one in found if one.service]:
        yield from judge(SERVICE, Service(answered))


# -- Replicas, any of which may be the primary in a moment -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """The facts about a primary and one of its replicas."""

    primary: Facts
    replica: Facts

    @property
    def silent(self) -> int:
        """Seconds since the last sign of life of the primary."""
        return self.replica.count("master_last_io_seconds_ago")

    @property
    def off(self) -> str:
        """Setting by which the replica, once promoted, needs no replicas."""
        by_lag = self.replica.setting("min-replicas-max-lag") == 0
        return "min-replicas-max-lag" if by_lag else "min-replicas-to-write"


_LOST = "If it is promoted, what was granted since then is lost: others acquire locks that are still held."
# fmt: off
NOW: tuple[Row[Pair], ...] = (
    Row("role", "bad", lambda p: p.replica.info and not p.replica.is_replica, "it is a primary itself",
        "Clients that are connected to it are granted locks that others hold.",
        "wait for the end of a failover; if it stays so: REPLICAOF the other"),
    Row("lag", "bad", lambda p: p.replica.is_replica and p.replica.info.get("master_link_status") != "up",
        "its link to the primary is down", _LOST,
        "see its log, and check the network, its password (primaryauth, masterauth) and repl-backlog-size"),
    Row("lag", "warn", lambda p: p.replica.is_replica and p.silent > p.replica.pings + BEHIND,
        lambda p: f"it has heard nothing of the primary for {p.silent} s", _LOST,
        "look at the load of both servers and at the network"),
)
LATER: tuple[Row[Pair], ...] = (
    Row("version", "warn", lambda p: p.replica.version and p.primary.version not in ("", p.replica.version),
        lambda p: f"it is {p.replica.version}, the primary {p.primary.version}",
        "The older one may not be able to follow the other.", "run the same version everywhere"),
    Row("min-replicas", "warn", lambda p: p.primary.needed_replicas and p.replica.needed_replicas == 0,
        lambda p: f"{p.off} is 0 here", "It keeps granting locks when it is cut off, next to a newer primary.",
        lambda p: f"CONFIG SET {p.off} {p.primary.setting(p.off)} there, too"),
)
# fmt: on


def of_replicas(
    primary: Facts, found: Mapping[str, Facts | None], watching: Sequence[SentinelFacts] = ()
) -> Iterator[Finding]:
    """Yield whether each replica could continue where the primary stops."""
    for where, facts in found.items():
        yield from _of_replica(primary, facts, f"replica {where}")
    if answered := [one for one in watching if one.service]:
        yield from judge(SUCCESSION, Service(answered, len(found)))


def _of_replica(primary: Facts, facts: Facts | None, where: str) -> Iterator[Finding]:
    if facts is None:
        meaning = "Once it is promoted, no lock can be acquired from here."
        fix = "start it, open the way to it, or set replica-announce-ip and replica-announce-port"
        yield Finding("replica", "warn", "it does not answer", meaning, fix, where)
        return
    pair = Pair(primary, facts)
    now = list(judge(NOW, pair, where))
    later = [*judge(LATER, pair, where), *judge(PROMOTED, facts, where)]
    later = [
        replace(one, level="warn", meaning=f"Once it is the primary: {lowered(one.meaning)}")
        for one in later
        if one.level in ("warn", "bad")
    ]
    yield from (*now, *later)
    if not now and not later:
        yield Finding("replica", "ok", "it could take over", where=where)
