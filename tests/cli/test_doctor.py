"""The doctor tells each fault by a line of its own, and writes nothing to the server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, Backoff, Coordinator, wait_until
from redis_sync_aio.cli._doctor.facts import Facts, Rights
from redis_sync_aio.cli._doctor.findings import (
    LATER,
    NOW,
    RIGHTS,
    SENTINEL,
    SERVER,
    SERVICE,
    SUCCESSION,
    of_rights,
    of_server,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.pairwise import first_of
from ..support.programs import CODES, command, examine, levels, printed_json, told
from ..support.topologies import Nodes
from .terminals import terminal

pytestmark = pytest.mark.real

SOON = Backoff(initial=0.01, cap=0.05)
SECRET = "correct-horse"


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of this module, whose settings and users tests change."""
    with EmbeddedServer(port=0, args=["--enable-debug-command", "yes"]) as running:
        yield running


@asynccontextmanager
async def settings_of(server: EmbeddedServer, settings: dict[str, Any]) -> AsyncIterator[Any]:
    """Change settings of the server, and change them back."""
    async with server.client(decode_responses=True) as client:
        before = {name: str((await client.config_get(name))[name]) for name in settings}
        for name, value in settings.items():
            await client.config_set(name, value)
        yield client
        for name, value in before.items():
            await client.config_set(name, value)


# -- one server --------------------------------------------------------------------------------------------


def test_a_server_as_it_should_be(tmp_path: Path) -> None:
    """Nothing is bad or risky, and the exit code is 0."""
    args = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path)]
    with EmbeddedServer(port=0, args=args) as server:
        found = examine(server.url)
    assert {level for check, level in levels(found).items() if check not in ("latency", "blocked")} == {"ok"}


RISKY: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "warn", "persistence", "appendonly is no"),
    ({"maxmemory-policy": "allkeys-lru", "maxmemory": "1gb"}, "bad", "eviction", "maxmemory-policy is allkeys-lru"),
    ({"maxmemory-policy": "volatile-ttl", "maxmemory": "1gb"}, "bad", "eviction", "maxmemory-policy is volatile-ttl"),
    ({"maxmemory-policy": "allkeys-lru"}, "warn", "eviction", r"maxmemory-policy is .*, but there is no maxmemory"),
    ({"maxmemory": "1"}, "bad", "memory", r"[\d,]+% of maxmemory is used .*"),
    ({"timeout": 5}, "warn", "timeout", "timeout is 5 s"),
    ({"tcp-keepalive": 0}, "warn", "keepalive", "tcp-keepalive is 0"),
    ({"client-output-buffer-limit": "pubsub 65536 32768 1"}, "warn", "buffers", r".*\(pubsub\) is 32,768 bytes"),
    ({"min-replicas-to-write": 2}, "bad", "replicas", "min-replicas-to-write is 2, and 0 replicas are in time"),
]
"""Settings, and what is found of them."""


@pytest.mark.parametrize(("settings", "level", "check", "found"), RISKY)
async def test_a_setting_that_is_a_risk(
    own: EmbeddedServer, settings: dict[str, Any], level: str, check: str, found: str
) -> None:
    async with settings_of(own, settings):
        assert re.fullmatch(found, told(own.url, level, check))


FINE = {"redis_version": "8.0.0"}
PRESENT = FINE | {"connected_slaves": 1, "min_slaves_good_slaves": 1}
FACTS: list[tuple[dict[str, Any], dict[str, str], str, str, str]] = [
    ({"redis_version": "6.0.9"}, {}, "version", "bad", "Redis 6.0.9"),
    ({}, {}, "version", "unknown", "INFO is not readable .*"),
    (FINE | {"used_memory": 90, "maxmemory": 100}, {}, "memory", "warn", "90% of maxmemory is used .*"),
    (FINE | {"used_memory": 80, "maxmemory": 100}, {}, "memory", "ok", "80% of maxmemory is used .*"),
    (FINE | {"connected_clients": 17, "maxclients": 20}, {}, "clients", "warn", "17 of 20 clients .*"),
    (FINE | {"connected_clients": 16, "maxclients": 20}, {}, "clients", "ok", "16 of 20 clients .*"),
    (FINE, {"timeout": "60"}, "timeout", "ok", "timeout is 60"),
    (FINE | {"aof_enabled": 1}, {"appendfsync": "no"}, "persistence", "warn", "appendfsync is no"),
    (FINE | {"aof_enabled": 1}, {}, "persistence", "unknown", "appendonly is yes, but appendfsync is not readable"),
    (FINE | {"role": "slave"}, {}, "role", "bad", "this server is a replica of .*"),
    (FINE, {"notify-keyspace-events": "KEA"}, "events", "ok", "notify-keyspace-events is KEA"),
    (FINE, {}, "clock", "unknown", "TIME is not readable .*"),
    (FINE, {}, "latency", "unknown", "TIME is not readable .*"),
    (FINE, {}, "settings", "unknown", "CONFIG .* is not readable .*"),
]
"""INFO and settings, and what is found of them: what cannot be read is never called ok."""


@pytest.mark.parametrize(("info", "settings", "check", "level", "found"), FACTS)
def test_what_facts_mean(info: dict[str, Any], settings: dict[str, str], check: str, level: str, found: str) -> None:
    (one,) = [it for it in of_server(Facts("here", info, settings)) if it.check == check]
    assert one.level == level
    assert re.fullmatch(found, one.found), one.found


@pytest.mark.parametrize(
    ("count", "least", "lag", "level", "meaning", "fix"),
    [
        (1, 0, 1, "warn", "A primary that is cut off keeps granting", "add a second replica, then CONFIG SET"),
        (2, 0, 1, "warn", "A primary that is cut off keeps granting", "CONFIG SET min-replicas-to-write 1 and"),
        (2, 1, 0, "warn", "A primary that is cut off keeps granting", "CONFIG SET min-replicas-to-write 1 and"),
        (2, 1, 600, "warn", "For so long an old primary grants", "CONFIG SET min-replicas-max-lag 1"),
        (1, 1, 1, "ok", "While the only one is down or restarts, the server refuses all writes", "add a replica"),
        (2, 2, 1, "ok", "While any of them is down or restarts, the server refuses all writes", "add a replica"),
        (1, 2, 1, "bad", "The server refuses all writes (NOREPLICAS)", "bring the replicas back"),
        (2, 1, 1, "ok", "", ""),
    ],
)
def test_replicas_that_are_too_few_too_late_or_none_too_many(
    count: int, least: int, lag: int, level: str, meaning: str, fix: str
) -> None:
    """Two replicas are needed for min-replicas-to-write 1: with one, the doctor tells what each choice costs."""
    info = FINE | {"connected_slaves": count, "min_slaves_good_slaves": count}
    settings = {"min-replicas-to-write": str(least), "min-replicas-max-lag": str(lag)}
    (found,) = [one for one in of_server(Facts("here", info, settings)) if one.check == "replicas"]
    assert found.level == level
    assert found.meaning.startswith(meaning)
    assert found.fix.startswith(fix)
    assert bool(found.meaning) == bool(meaning)


async def test_a_replica_and_its_primary(own: EmbeddedServer) -> None:
    with EmbeddedServer(port=0) as replica:
        async with own.client() as client, replica.client() as copy:
            await copy.replicaof(own.host, own.port)

            async def follows() -> bool:
                return "online" in str((await client.info("replication")).get("slave0"))

            await wait_until(follows, SOON, timeout=50)
        assert told(replica.url, "bad", "role") == f"this server is a replica of 127.0.0.1:{own.port}"
        assert told(own.url, "warn", "replicas") == "1 replica, and min-replicas-to-write is 0"


@pytest.mark.ci
async def test_a_save_that_failed() -> None:
    """The server then refuses writes."""
    with EmbeddedServer(port=0, args=["--save", "3600 1", "--dbfilename", "there.rdb"]) as server:
        async with server.client() as client:
            directory = Path(str((await client.config_get("dir"))["dir"])) / "there.rdb"
            (directory / "full").mkdir(parents=True)
            await client.bgsave()

            async def failed() -> bool:
                return bool((await client.info("persistence"))["rdb_last_bgsave_status"] == "err")

            await wait_until(failed, SOON, timeout=50)
        assert told(server.url, "bad", "persistence") == "the last save failed"


async def test_clocks_a_slow_way_and_a_command_that_blocked(
    own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the doctor's process is set. The arguments of the command are not shown."""
    async with own.client() as client:
        made: Any = client
        await made.execute_command("DEBUG", "SLEEP", "0.2")
    assert "DEBUG blocked the server for" in told(own.url, "warn", "blocked")
    assert "SLEEP" not in command("doctor", "--url", own.url, "--json").stdout
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 90)
    assert " s behind this machine's" in told(own.url, "warn", "clock")
    async with FaultProxy(own) as proxy:
        proxy.latency = 0.02
        assert "a round trip takes" in await asyncio.to_thread(told, proxy.url, "warn", "latency")


@pytest.mark.ci
async def test_settings_scripts_and_resp3_that_a_service_does_not_offer(own: EmbeddedServer) -> None:
    renamed = ("EVALSHA", "EVAL", "CONFIG")
    args = [word for name in renamed for word in ("--rename-command", name, f"hidden-{name}")]
    with EmbeddedServer(port=0, args=args) as server:
        seen = {one["check"]: one for one in examine(server.url)}
    assert seen["settings"]["level"] == "unknown"
    assert seen["eviction"]["level"] == "ok"
    scripts = seen["scripts"]
    assert (scripts["level"], scripts["found"]) == ("warn", "scripts are disabled on this server")
    assert "ACL" not in scripts["fix"]  # which could not allow them
    async with FaultProxy(own) as proxy:
        proxy.on(lambda args: args[0].upper() == b"HELLO", Action.answer_error("ERR unknown command 'HELLO'."))
        found = await asyncio.to_thread(told, proxy.url, "warn", "push")
        assert found.startswith("RESP3 (HELLO 3) is refused: ")
        assert not found.endswith(".")


async def test_a_client_that_receives_everything(server: EmbeddedServer, redis: Redis) -> None:
    async with redis.pubsub() as pubsub:
        await pubsub.psubscribe("*")
        await pubsub.get_message(timeout=50)
        assert told(server.url, "warn", "push") == "1 other client receives the messages of every channel"


async def test_a_cluster() -> None:
    """Each node is asked. A shard without a replica; full coverage; a slot half moved; slots without a primary."""
    async with Nodes() as nodes:
        first, second, last = nodes.primaries
        url = f"redis+cluster://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        await nodes.call(first, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
        await nodes.begin_move(0, first, second)
        found = examine(url)
        assert {one["where"] for one in found} >= {f"127.0.0.1:{node.port}" for node in nodes.primaries}
        risks = {(one["check"], one["found"]) for one in found if one["level"] == "warn"}
        assert risks >= {
            ("shard", "this shard has no replica"),
            ("coverage", "cluster-require-full-coverage is yes"),
            ("moving", "1 slot is half moved"),
        }
        await nodes.call(last, "CLUSTER", "DELSLOTS", 16382, 16383)
        assert told(f"redis+cluster://127.0.0.1:{last.port}", "bad", "slots") == "2 of 16,384 slots have no primary"


# -- the rights of the user ----------------------------------------------------------------------------------


async def user(server: EmbeddedServer, *rules: str) -> dict[str, str]:
    """Give the server a user, and return how a program logs in as it."""
    async with server.client() as client:
        made: Any = client
        await made.execute_command("ACL", "SETUSER", "locks", "reset", "on", f">{SECRET}", *rules)
    return {"REDIS_USERNAME": "locks", "REDIS_PASSWORD": SECRET}


def found_of(check: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = [it for it in found if it["check"] == check]
    return one


async def apply(server: EmbeddedServer, check: str, *words: str, **env: str) -> str:
    """Do what the doctor advises about ``check``, word by word, and return the level that it then finds."""
    found = found_of(check, examine(server.url, *words, **env))
    assert found["level"] in ("warn", "bad")
    fix = found["fix"].partition(" (")[0].split()
    assert fix[:3] == ["ACL", "SETUSER", "locks"]
    async with server.client() as client:
        made: Any = client
        await made.execute_command(*fix)
    return str(found_of(check, examine(server.url, *words, **env))["level"])


EVERY = ("~*", "&*", "+@all")
LACKING: list[tuple[tuple[str, ...], str, str, str]] = [
    ((*EVERY, "-evalsha", "-eval"), "warn", "scripts", "user 'locks' may not call scripts"),
    ((*EVERY, "-zadd", "-pexpire"), "bad", "commands", "user 'locks' may not run PEXPIRE, ZADD"),
    ((*EVERY, "resetchannels"), "warn", "push", "messages cannot be pushed: .*"),
    (("~*", "&rsa:*", "+@all", "-publish"), "warn", "push", "messages cannot be pushed: .*"),
    (("~orders:*", *EVERY[1:]), "bad", "keys", r"user 'locks' may use orders:\*, but not all keys of a lock"),
    (EVERY[1:], "bad", "keys", "user 'locks' may use no keys"),
]
"""Rights, and what is found of them."""


@pytest.mark.parametrize(("rules", "level", "check", "found"), LACKING)
async def test_the_doctor_tells_what_a_user_lacks_and_is_content_with_what_it_advises(
    own: EmbeddedServer, rules: tuple[str, ...], level: str, check: str, found: str
) -> None:
    env = await user(own, *rules)
    assert re.fullmatch(found, told(own.url, level, check, **env))
    assert await apply(own, check, **env) == "ok"


async def test_a_user_without_evalsha_may_call_scripts(own: EmbeddedServer) -> None:
    """They are sent in full."""
    env = await user(own, *EVERY, "-evalsha")
    assert found_of("scripts", examine(own.url, **env))["level"] == "ok"


LOCKED = {
    "x": "x",
    "orders:*": "orders:42",
    "[ab]?x": "b-x",
    r"\*x": "*x",
    "orders:{*}": "orders:{42}",
    "{x}": "{x}",
    "{a": "a",
    "{orders:*": "orders:42",
    "a}b": "a}b",
    "": "orders:42",
}
"""A name that may be locked once the advice for a pattern was taken; "": no pattern."""


@pytest.mark.parametrize("pattern", first_of(*LOCKED))
async def test_a_lock_can_be_held_and_waited_for_with_the_keys_that_the_doctor_advises(
    own: EmbeddedServer, pattern: str
) -> None:
    env = await user(own, *([f"~{pattern}"] if pattern else []), "&*", "+@all")
    assert await apply(own, "keys", **env) == "ok"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(own.client(username="locks", password=SECRET))
        sync, other = [await stack.enter_async_context(Coordinator(client)) for _ in range(2)]
        lease = await sync.lock(LOCKED[pattern]).acquire()
        with pytest.raises(AcquireTimeout):
            await other.lock(LOCKED[pattern]).acquire(timeout=0.1)
        await lease.release()


@pytest.mark.parametrize("pattern", first_of("app1:orders:*", "app1:{orders:4", "orders:*", ""))
async def test_the_keys_of_a_tenant(own: EmbeddedServer, pattern: str) -> None:
    """All keys with its prefix are enough; the advice for fewer is about keys with the prefix."""
    tenant = ("--prefix", "app1:")
    keys = found_of("keys", examine(own.url, *tenant, **await user(own, "~app1:*", "&*", "+@all")))
    assert (keys["level"], keys["found"]) == ("ok", "user 'locks' may use all keys that begin with app1:")
    env = await user(own, *([f"~{pattern}"] if pattern else []), "&*", "+@all")
    assert await apply(own, "keys", *tenant, **env) == "ok"


async def test_what_may_not_be_looked_at_is_said(own: EmbeddedServer) -> None:
    """With the least rights that locks need, nothing crashes, and nothing is called ok that was not seen."""
    needed = "+evalsha +eval +subscribe +publish +get +set +del +pttl +pexpire +time +zadd +zrem +zrange +zscore +zcard"
    found = examine(own.url, **await user(own, "~orders:*", "~{orders:*", "&rsa:*", "-@all", *needed.split()))
    seen = levels(found)
    hidden = ("version", "eviction", "persistence", "settings", "commands", "keys")
    assert {seen[check] for check in hidden} == {"unknown"}
    assert (seen["scripts"], seen["push"]) == ("ok", "ok")
    assert all("readable" in one["found"] for one in found if one["level"] == "unknown")
    found = examine(own.url, **await user(own, "~orders:*", "~{orders:*", "~cache:*", *EVERY[1:]))
    keys = found_of("keys", found)
    assert (keys["level"], keys["found"]) == ("ok", "user 'locks' may lock names like orders:*")


# -- what holds for all ------------------------------------------------------------------------------------


def test_each_risk_has_a_meaning_and_a_remedy() -> None:
    """A row of the table cannot leave them out."""
    tables = (SERVER, RIGHTS, SENTINEL, SERVICE, SUCCESSION, NOW, LATER)
    risks = [row for table in tables for row in table if row.level in ("warn", "bad")]
    assert len(risks) > 40
    assert [row.check for row in risks if not (row.meaning and row.fix)] == []


@pytest.mark.parametrize(
    ("number", "slots", "moving", "others"),
    [
        (1, "1 of 16,384 slots has no primary", "1 slot is half moved", "1 other client receives the"),
        (2, "2 of 16,384 slots have no primary", "2 slots are half moved", "2 other clients receive the"),
    ],
)
def test_one_and_two_of_what_is_counted_are_told_in_english(number: int, slots: str, moving: str, others: str) -> None:
    about = {"cluster_state": "ok", "cluster_slots_assigned": str(16384 - number)}
    node = ["id", "here", "myself,master", "-", "0", "0", "1", "connected", "0-1", *["[1->-id]"] * number]
    found = {one.check: one.found for one in of_server(Facts("here", {}, {}, cluster=about, nodes=[node]))}
    assert (found["slots"], found["moving"]) == (slots, moving)
    heard = {one.check: one.found for one in of_rights(Rights(listeners=number + 1))}
    assert heard["push"].startswith(others)


READING = {
    *("ACL", "AUTH", "CLIENT", "CLUSTER", "CONFIG", "HELLO", "INFO", "PING", "SELECT", "SLOWLOG", "TIME"),
    *("EVALSHA", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE"),
}
"""EVALSHA of a script that does not exist, and a message in a channel that nobody else has."""


async def test_it_writes_nothing() -> None:
    """MONITOR sees commands that read; not one key is there, and no change is counted, when it is over."""
    seen: set[str] = set()
    with EmbeddedServer(port=0) as server:
        async with server.client() as client, client.monitor() as monitor:
            report = await asyncio.to_thread(printed_json, "doctor", "--url", server.url, expect=(0, 1, 2))
            await client.echo("over")
            async for it in monitor.listen():
                words = it["command"].split()
                if words == ["ECHO", "over"]:
                    break
                seen.add(words[0].upper())
            assert await client.keys() == []
            assert (await client.info("persistence"))["rdb_changes_since_last_save"] == 0
    assert report["findings"]
    assert {"INFO", "EVALSHA"} <= seen <= READING


async def test_text_is_one_line_for_each_finding_and_the_worst_come_first(own: EmbeddedServer) -> None:
    async with settings_of(own, {"maxmemory-policy": "allkeys-lru", "maxmemory": "1gb"}):
        done = command("doctor", "--url", own.url)
    order = ["bad", "warn", "unknown", "ok"]
    seen = [order.index(line.split()[0]) for line in done.stdout.splitlines()]
    assert seen == sorted(seen)
    start = "bad     eviction: maxmemory-policy is allkeys-lru. Held locks have a ttl and may be "
    assert done.stdout.startswith(start)
    assert "Fix: CONFIG SET maxmemory-policy noeviction" in done.stdout.splitlines()[0]
    assert done.returncode == CODES["bad"]


@pytest.mark.ci
def test_a_name_that_looks_like_markup_is_printed_as_it_is() -> None:
    user = ("--user", "[/bold]", "on", ">secret", "~*", "&*", "+@all", "-@scripting")
    with (
        EmbeddedServer(port=0, args=user) as server,
        terminal("doctor", columns=120, REDIS_URL=server.url, REDIS_USERNAME="[/bold]", REDIS_PASSWORD="secret") as it,
    ):
        it.shows("may not call scripts")
        assert it.end() in (CODES["warn"], CODES["bad"])
        assert "user '[/bold]' may not call scripts" in it.text
