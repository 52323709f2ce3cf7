"""Checks of what a crash, a failover, a slow server or a wrong clock does to locks."""

from __future__ import annotations

from collections.abc import Iterator

from .._session import counted
from .facts import Facts
from .groups import Finding, unreadable

SLOW = 0.01
"""Seconds: a slower round trip is felt at every lock."""
BLOCKED = 0.1
"""Seconds: a command that takes longer delays renewals and hand-overs."""
APART = 1.0
"""Seconds that clocks may differ."""
CLOSE = 1
"""Seconds: min-replicas-max-lag that keeps two primaries from granting the same lock."""


def persistence(facts: Facts) -> Iterator[Finding]:
    """Yield what a restart does to locks, and whether a failed save stops all writes."""
    aof = facts.number("aof_enabled")
    if aof is None:
        yield unreadable("persistence", "appendonly")
        return
    saves = facts.settings.get("save", "") != "" and facts.settings.get("stop-writes-on-bgsave-error") == "yes"
    failed = [
        *(["save"] if saves and facts.info.get("rdb_last_bgsave_status", "ok") != "ok" else []),
        *(["write to the append-only file"] if facts.info.get("aof_last_write_status", "ok") != "ok" else []),
    ]
    if failed:
        meaning = "The server refuses all writes (MISCONF), so no lock can be acquired or renewed."
        fix = "see the server's log, and give it disk space and rights to its directory"
        yield Finding("persistence", "bad", f"the last {' and '.join(failed)} failed", meaning, fix)
        return
    how = facts.settings.get("appendfsync")
    if aof and how is None:
        yield Finding("persistence", "unknown", "appendonly is yes, but appendfsync is not readable")
        return
    if aof and how != "no":
        yield Finding("persistence", "ok", f"appendonly is yes, appendfsync {how}")
        return
    found = "appendfsync is no" if aof else "appendonly is no"
    meaning = "A restart loses grants: others can acquire a lock until its holder notices at its next renewal."
    fix = "CONFIG SET appendonly yes and appendfsync always, or check fences where the data is written"
    yield Finding("persistence", "warn", found, meaning, fix)


def replicas(facts: Facts) -> Iterator[Finding]:
    """Yield whether a failover can lead to two holders, and whether a missing replica stops all writes."""
    count, least = facts.number("connected_slaves"), facts.needed_replicas
    if count is None or facts.is_replica:
        return
    online = [value for name, value in facts.info.items() if name.startswith("slave") and isinstance(value, dict)]
    good = sum(one.get("state") == "online" for one in online)
    if least is None:
        yield Finding("replicas", "unknown", f"{_replicas(count)}; min-replicas-to-write is not readable")
        return
    lag = facts.setting("min-replicas-max-lag")
    known = "min-replicas-max-lag is 0" if lag == 0 else f"min-replicas-to-write is {least}"
    in_time = facts.number("min_slaves_good_slaves")
    good = good if in_time is None else in_time
    if least > good:
        found = f"{known}, and {_replicas(good)} {'is' if good == 1 else 'are'} in time"
        meaning = "The server refuses all writes (NOREPLICAS), so no lock can be acquired or renewed."
        fix = f"bring the replicas back; until then CONFIG SET min-replicas-to-write {good}"
        yield Finding("replicas", "bad", found, meaning, fix)
    elif count and not least:
        found = f"{_replicas(count)}, and {known}"
        meaning = "A primary that is cut off goes on granting locks that the new primary grants, too."
        fix = "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 1 on all servers"
        if count == 1:
            fix = f"add a second replica, then {fix}. With a single one, its restart would stop all locks"
        yield Finding("replicas", "warn", found, meaning, fix)
    elif least and lag and lag > CLOSE:
        found = f"min-replicas-max-lag is {lag} s"
        meaning = "For so long an old primary grants locks that the new primary grants, too."
        yield Finding("replicas", "warn", found, meaning, "CONFIG SET min-replicas-max-lag 1 on all servers")
    elif least and count == least:
        which = "the only one" if count == 1 else "any of them"
        meaning = f"While {which} is down or restarts, the server refuses all writes: no lock is acquired or renewed."
        yield Finding("replicas", "ok", f"{_replicas(count)}, {known}", meaning, "add a replica")
    else:
        yield Finding("replicas", "ok", f"{_replicas(count)}, {known}")


def _replicas(count: int) -> str:
    return counted(count, "replica")


def clock(facts: Facts) -> Iterator[Finding]:
    """Yield whether the server and this machine agree on the time."""
    if facts.ahead is None:
        yield unreadable("clock", "TIME")
        return
    if abs(facts.ahead) <= APART:
        yield Finding("clock", "ok", "the server's clock agrees with this machine's")
        return
    found = (
        f"the server's clock is {abs(facts.ahead):,.0f} s {'ahead of' if facts.ahead > 0 else 'behind'} this machine's"
    )
    meaning = "Leases do not depend on it, but fences are times of the server: after a failover they may jump or stall."
    yield Finding("clock", "warn", found, meaning, "run NTP (chrony) on the server and here")


def latency(facts: Facts) -> Iterator[Finding]:
    """Yield how long a command takes, and whether one blocked the server."""
    if facts.latency is None:
        yield unreadable("latency", "TIME")
    elif facts.latency <= SLOW:
        yield Finding("latency", "ok", _round_trip(facts.latency))
    else:
        meaning = "Each acquire, release and hand-over takes at least as long."
        fix = "run close to the server; look at its load and at proxies"
        yield Finding("latency", "warn", _round_trip(facts.latency), meaning, fix)
    if facts.slowest is not None and facts.slowest[1] > BLOCKED:
        name, seconds = facts.slowest
        found = f"in the last hour {name} blocked the server for {seconds * 1000:,.0f} ms"
        meaning = "Renewals and hand-overs wait as long; a lease shorter than that is lost."
        yield Finding("blocked", "warn", found, meaning, f"see SLOWLOG GET; avoid {name}, or run it on another server")


def _round_trip(seconds: float) -> str:
    return f"a round trip takes {seconds * 1000:.1f} ms (median)"


CHECKS = (persistence, replicas, clock, latency)
