"""The doctor tells each fault by a line of its own, and writes nothing to the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Backoff, wait_until
from redis_sync_aio.cli._doctor.facts import Facts
from redis_sync_aio.cli._doctor.findings import LATER, NOW, RIGHTS, SENTINEL, SERVER, SERVICE, SUCCESSION, of_server
from redis_sync_aio.embedded import EmbeddedServer

from ..support.clusters import EVEN, SHARDS, SLOTS, cluster
from ..support.doctor import CODES, examine, levels, told
from ..support.pairwise import first_of
from ..support.programs import command, printed_json, terminal
from ..support.proxy import ERROR, FaultProxy

SOON = Backoff(initial=0.01, cap=0.05)


async def off_the_loop(url: str, level: str, check: str, *words: str, **env: str) -> str:
    """Do what `told` does while a proxy in this event loop has to go on."""
    return await asyncio.to_thread(told, url, level, check, *words, **env)


# -- one server --------------------------------------------------------------------------------------------


def test_a_server_as_it_should_be(tmp_path: Path) -> None:
    """Nothing is bad or risky, and the exit code is 0."""
    args = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(tmp_path)]
    with EmbeddedServer(port=0, args=args) as server:
        found = examine(server.url)
    assert {level for check, level in levels(found).items() if check not in ("latency", "blocked")} == {"ok"}


@pytest.mark.parametrize("policy", first_of("allkeys-lru", "volatile-ttl"))
def test_eviction(policy: str) -> None:
    with EmbeddedServer(port=0, args=["--maxmemory-policy", policy, "--maxmemory", "100mb"]) as server:
        assert told(server.url, "bad", "eviction") == f"maxmemory-policy is {policy}"


@pytest.mark.ci
def test_eviction_that_is_configured_but_cannot_happen_yet() -> None:
    with EmbeddedServer(port=0, args=["--maxmemory-policy", "allkeys-lru"]) as server:
        assert told(server.url, "warn", "eviction") == "maxmemory-policy is allkeys-lru, but there is no maxmemory"


@pytest.mark.ci
async def test_memory_that_is_almost_full() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as client:
            await client.setrange("data", 50_000_000, "x")
            used = (await client.info("memory"))["used_memory"]
            await client.config_set("maxmemory", int(used * 1.1))
        assert "of maxmemory is used" in told(server.url, "warn", "memory")


async def test_clients_that_are_almost_too_many() -> None:
    with EmbeddedServer(port=0, args=["--maxclients", "20"]) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(17):
                client = await stack.enter_async_context(server.client())
                await client.ping()
            assert "of 20 clients (maxclients)" in told(server.url, "warn", "clients")


@pytest.mark.ci
def test_a_timeout_that_closes_connections() -> None:
    with EmbeddedServer(port=0, args=["--timeout", "5"]) as server:
        assert told(server.url, "warn", "timeout") == "timeout is 5 s"


@pytest.mark.ci
def test_no_keepalive() -> None:
    with EmbeddedServer(port=0, args=["--tcp-keepalive", "0"]) as server:
        assert told(server.url, "warn", "keepalive") == "tcp-keepalive is 0"


@pytest.mark.ci
async def test_a_small_buffer_for_subscribers() -> None:
    with EmbeddedServer(port=0) as server:
        async with server.client() as client:
            await client.config_set("client-output-buffer-limit", "pubsub 65536 32768 1")
        assert "(pubsub) is 32,768 bytes" in told(server.url, "warn", "buffers")


# -- crashes, failovers, time ------------------------------------------------------------------------------


def test_no_persistence(server: EmbeddedServer) -> None:
    assert told(server.url, "warn", "persistence") == "appendonly is no"


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


async def follow(primary: EmbeddedServer, replica: EmbeddedServer) -> None:
    async with primary.client() as client, replica.client() as copy:
        await copy.replicaof(primary.host, primary.port)

        async def follows() -> bool:
            return "online" in str((await client.info("replication")).get("slave0"))

        await wait_until(follows, SOON, timeout=50)


async def test_replicas() -> None:
    """A replica itself; a primary that goes on without replicas; one that waits too long; one that has too few."""
    with EmbeddedServer(port=0) as primary, EmbeddedServer(port=0) as replica:
        await follow(primary, replica)
        assert told(replica.url, "bad", "role") == f"this server is a replica of 127.0.0.1:{primary.port}"
        assert told(primary.url, "warn", "replicas") == "1 replica, and min-replicas-to-write is 0"
        async with primary.client() as client:
            await client.config_set("min-replicas-to-write", 1)
            await client.config_set("min-replicas-max-lag", 600)
            assert told(primary.url, "warn", "replicas") == "min-replicas-max-lag is 600 s"
            await client.config_set("min-replicas-to-write", 2)
            assert told(primary.url, "bad", "replicas") == "min-replicas-to-write is 2, and 1 replica is in time"
            await client.config_set("min-replicas-max-lag", 0)  # it turns the check off: the server takes writes
            await client.set("still", "written")
            assert told(primary.url, "warn", "replicas") == "1 replica, and min-replicas-max-lag is 0"


@pytest.mark.parametrize(
    ("count", "least", "level", "meaning", "fix"),
    [
        (
            1,
            0,
            "warn",
            "A primary that is cut off goes on granting",
            "add a second replica, then CONFIG SET",
        ),
        (2, 0, "warn", "A primary that is cut off goes on granting", "CONFIG SET min-replicas-to-write 1 and"),
        (1, 1, "ok", "While the only one is down or restarts, the server refuses all writes", "add a replica"),
        (2, 2, "ok", "While any of them is down or restarts, the server refuses all writes", "add a replica"),
        (2, 1, "ok", "", ""),
    ],
)
def test_a_replica_without_which_the_server_refuses_writes(
    count: int, least: int, level: str, meaning: str, fix: str
) -> None:
    """Two replicas are needed for min-replicas-to-write 1: with one, the doctor tells what each choice costs."""
    info = {"redis_version": "8.0.0", "connected_slaves": count, "min_slaves_good_slaves": count}
    settings = {"min-replicas-to-write": str(least), "min-replicas-max-lag": "1"}
    (found,) = [one for one in of_server(Facts("here", info, settings)) if one.check == "replicas"]
    assert found.level == level
    assert found.meaning.startswith(meaning)
    assert found.fix.startswith(fix)
    assert bool(found.meaning) == bool(meaning)


@pytest.mark.ci
def test_clocks_that_disagree(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the doctor's process is set, as that of the server cannot be."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 90)
    assert " s behind this machine's" in told(server.url, "warn", "clock")


@pytest.mark.ci
async def test_a_slow_way_to_the_server(server: EmbeddedServer) -> None:
    assert server.port is not None
    async with FaultProxy((server.host, server.port)) as proxy:
        proxy.latency = 0.02
        assert "a round trip takes" in await off_the_loop(proxy.url, "warn", "latency")


@pytest.mark.ci
async def test_a_command_that_blocked_the_server() -> None:
    """Its arguments are not shown."""
    with EmbeddedServer(port=0, args=["--enable-debug-command", "yes"]) as server:
        async with server.client() as client:
            made: Any = client
            await made.execute_command("DEBUG", "SLEEP", "0.2")
        assert "DEBUG blocked the server for" in told(server.url, "warn", "blocked")
        assert "SLEEP" not in command("doctor", "--url", server.url, "--json").stdout


# -- settings, scripts, messages ---------------------------------------------------------------------------


@pytest.mark.ci
def test_a_service_without_config() -> None:
    with EmbeddedServer(port=0, args=["--rename-command", "CONFIG", "hidden"]) as server:
        seen = {one["check"]: one for one in examine(server.url)}
    assert seen["settings"]["level"] == "unknown"
    assert "not readable" in seen["settings"]["found"]
    assert seen["eviction"]["level"] == "ok"


def test_nothing_is_called_ok_that_could_not_be_read() -> None:
    """Neither TIME nor CONFIG may be asked: the way, the clock and appendfsync are not known."""
    found = list(of_server(Facts("here", {"aof_enabled": 1, "redis_version": "8.0.0"}, {})))
    unknown = {one.check for one in found if one.level == "unknown"}
    assert {"clock", "latency", "persistence"} <= unknown
    assert not {"clock", "latency", "persistence"} & {one.check for one in found if one.level == "ok"}


def test_each_risk_has_a_meaning_and_a_remedy() -> None:
    """A row of the table cannot leave them out."""
    tables = (SERVER, RIGHTS, SENTINEL, SERVICE, SUCCESSION, NOW, LATER)
    risks = [row for table in tables for row in table if row.level in ("warn", "bad")]
    assert len(risks) > 40
    assert [row.check for row in risks if not (row.meaning and row.fix)] == []


def test_a_server_without_scripts() -> None:
    args = ["--rename-command", "EVALSHA", "hidden-1", "--rename-command", "EVAL", "hidden-2"]
    with EmbeddedServer(port=0, args=args) as server:
        (scripts,) = [one for one in examine(server.url) if one["check"] == "scripts"]
    assert (scripts["level"], scripts["found"]) == ("warn", "scripts are disabled on this server")
    assert "ACL" not in scripts["fix"]  # which could not allow them


@pytest.mark.ci
async def test_a_proxy_without_resp3(server: EmbeddedServer) -> None:
    assert server.port is not None
    async with FaultProxy((server.host, server.port)) as proxy:
        proxy.on(lambda args: args[0].upper() == b"HELLO", ERROR("ERR unknown command 'HELLO'."))
        found = await off_the_loop(proxy.url, "warn", "push")
        assert found.startswith("RESP3 (HELLO 3) is refused: ")
        assert not found.endswith(".")


@pytest.mark.ci
async def test_a_client_that_receives_everything(server: EmbeddedServer, redis: Redis) -> None:
    async with redis.pubsub() as pubsub:
        await pubsub.psubscribe("*")
        await pubsub.get_message(timeout=50)
        assert told(server.url, "warn", "push") == "1 other client receives the messages of every channel"


# -- clusters -------------------------------------------------------------------------------------------


async def test_a_cluster() -> None:
    """A shard without a replica; a node that wants full coverage; slots that nobody has; a slot that is half moved."""
    async with cluster() as nodes:
        first, second, _ = nodes.primaries
        url = f"redis+cluster://127.0.0.1:{first.port}"
        assert told(url, "warn", "shard") == "this shard has no replica"
        await nodes.say(first, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
        assert told(url, "warn", "coverage") == "cluster-require-full-coverage is yes"
        await nodes.say(first, "CONFIG", "SET", "cluster-require-full-coverage", "no")
        await nodes.begin_move(0, first, second)
        assert told(url, "warn", "moving") == "1 slot is half moved"


@pytest.mark.ci
async def test_slots_that_nobody_has() -> None:
    bounds = [*EVEN[:SHARDS], SLOTS]
    async with cluster(bounds=bounds) as nodes:
        last = nodes.primaries[-1]
        await nodes.say(last, "CLUSTER", "DELSLOTS", SLOTS - 2, SLOTS - 1)
        url = f"redis+cluster://127.0.0.1:{last.port}"
        assert told(url, "bad", "slots") == "2 of 16,384 slots have no primary"


# -- what holds for all ------------------------------------------------------------------------------------

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
    assert "INFO" in seen
    assert "EVALSHA" in seen
    assert seen <= READING


def test_text_is_one_line_for_each_finding_and_the_worst_come_first() -> None:
    with EmbeddedServer(port=0, args=["--maxmemory-policy", "allkeys-lru", "--maxmemory", "1gb"]) as server:
        done = command("doctor", "--url", server.url)
    order = ["bad", "warn", "unknown", "ok"]
    seen = [order.index(line.split()[0]) for line in done.stdout.splitlines()]
    assert seen == sorted(seen)
    assert done.stdout.startswith(
        "bad     eviction: maxmemory-policy is allkeys-lru. Held locks have a ttl and may be "
    )
    assert "Fix: CONFIG SET maxmemory-policy noeviction" in done.stdout.splitlines()[0]
    assert done.returncode == 2


@pytest.mark.ci
def test_a_name_that_looks_like_markup_is_printed_as_it_is() -> None:
    user = ("--user", "[/bold]", "on", ">secret", "~*", "&*", "+@all", "-evalsha")
    with (
        EmbeddedServer(port=0, args=user) as server,
        terminal("doctor", columns=120, REDIS_URL=server.url, REDIS_USERNAME="[/bold]", REDIS_PASSWORD="secret") as it,
    ):
        it.shows("may not call scripts")
        assert it.end() in (CODES["warn"], CODES["bad"])
        assert "user '[/bold]' may not call scripts" in it.text
