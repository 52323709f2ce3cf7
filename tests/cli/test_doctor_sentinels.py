"""The doctor asks all sentinels and all replicas of a service, and tells each fault by a line of its own."""

from __future__ import annotations

from typing import Any

import pytest

from redis_sync_aio import Backoff, wait_until
from redis_sync_aio.cli._doctor.facts import Facts, SentinelFacts
from redis_sync_aio.cli._doctor.findings import of_replicas, of_sentinels
from redis_sync_aio.testing.servers import SentinelTopology

from ..support.programs import command, examine, levels, told
from ..support.topologies import PATIENT

pytestmark = pytest.mark.real

SOON = Backoff(initial=0.01, cap=0.05)


def url_of(group: SentinelTopology, *ports: int) -> str:
    return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports or group.ports) + f"/{group.group}"


@pytest.mark.ci
async def test_sentinels() -> None:
    """A quorum that is a minority, cannot be reached, or is not the same for all; sentinels that do not answer."""
    async with SentinelTopology(down_after=PATIENT) as group:
        assert levels(examine(url_of(group)))["quorum"] == "ok"
        for one in group.sentinels:
            await group.call(one, "SENTINEL", "SET", group.group, "quorum", "1")
        assert told(url_of(group), "warn", "quorum") == "the quorum is 1 of 3"
        for one in group.sentinels:
            await group.call(one, "SENTINEL", "SET", group.group, "quorum", "4")
        assert told(url_of(group), "bad", "quorum").startswith("NOQUORUM")
        for one, quorum in zip(group.sentinels, "233", strict=True):
            await group.call(one, "SENTINEL", "SET", group.group, "quorum", quorum)
        assert told(url_of(group), "warn", "quorum").startswith("the sentinels have different quorums: 2 at 127.0.0.1:")
        assert told(url_of(group), "warn", "down-after") == "down-after-milliseconds is 600000"
        assert told(url_of(group, group.ports[0], 1), "warn", "sentinel") == "it does not answer"
        group.sentinels[2].kill()
        found = [one for one in examine(url_of(group, *group.ports[:2])) if one["check"] == "sentinel"]
        assert [(one["level"], one["where"]) for one in found] == [("warn", f"127.0.0.1:{group.ports[2]}")]
        url = f"redis://127.0.0.1:{group.ports[0]}"
        assert told(url, "bad", "role") == "this is a sentinel, not the server that it watches"
        line = command("doctor", "--url", url_of(group).replace(group.group, "nobody")).stderr
        assert "no primary was found for service 'nobody'" in line
        assert found[0]["found"] == "the others announce it at this address, where it does not answer"


async def test_replicas_of_a_sentinel_set() -> None:
    """One that would evict locks as the primary; one that cannot follow; a dead one."""
    async with (
        SentinelTopology(down_after=PATIENT) as group,
        group.primary.client() as primary,
        group.replica.client() as replica,
    ):
        url = url_of(group)
        there = f"replica {group.replica.host}:{group.replica.port}"
        await primary.config_set("min-replicas-to-write", 1)
        assert told(url, "warn", "min-replicas") == "min-replicas-to-write is 0 here"
        await replica.config_set("maxmemory", "1gb")
        await replica.config_set("maxmemory-policy", "allkeys-lru")
        evicts = next(one for one in examine(url) if one["check"] == "eviction" and one["where"] == there)
        assert evicts["level"] == "warn"
        assert evicts["meaning"].startswith("Once it is the primary: held locks have a ttl and may be evicted")
        await group.partition()

        async def down() -> bool:
            return bool((await replica.info("replication"))["master_link_status"] == "down")

        await wait_until(down, SOON, timeout=50)
        assert told(url, "bad", "lag") == "its link to the primary is down"
        group.replica.kill()
        assert told(url, "warn", "replica") == "it does not answer"


def test_what_a_replica_says_is_compared_with_its_primary() -> None:
    """Another version; one that takes itself for a primary; one that hears nothing; none that may be promoted."""

    def facts(version: str, **info: Any) -> Facts:
        return Facts("there", {"redis_version": version, "role": "slave", "master_link_status": "up", **info}, {})

    told = {
        (one.check, one.level): one.found
        for one in of_replicas(
            facts("8.0.1", role="master"),
            {
                "a:1": facts("7.4.0", master_last_io_seconds_ago=99),
                "b:1": facts("8.0.1", role="master"),
                "c:1": facts("8.0.1", master_last_io_seconds_ago=9, aof_enabled=1),
            },
            [SentinelFacts("s:1", {"quorum": "2"}, replicas=[{"slave-priority": "0"}])],
        )
    }
    assert told["version", "warn"] == "it is Redis 7.4.0, the primary Redis 8.0.1"
    assert told["lag", "warn"] == "it has heard nothing of the primary for 99 s"
    assert told["role", "bad"] == "it is a primary itself"
    assert told["replica", "ok"] == "it could take over"
    assert told["replica", "bad"] == "replica-priority of every replica is 0"
    (none,) = of_replicas(facts("8.0.1"), {}, [SentinelFacts("s:1", {"quorum": "2"})])
    assert none.found == "the service has no replica"


@pytest.mark.parametrize("off", ["min-replicas-to-write", "min-replicas-max-lag"])
def test_a_replica_that_would_go_on_when_it_is_cut_off(off: str) -> None:
    """Either setting turns the check of replicas off; the other one then says nothing."""
    settings = {"min-replicas-to-write": "2", "min-replicas-max-lag": "1"}
    info = {"role": "slave", "master_link_status": "up"}
    primary = Facts("here", {"role": "master"}, settings)
    replica = Facts("there", info, settings | {off: "0"})
    (found,) = [one for one in of_replicas(primary, {"there": replica}) if one.check == "min-replicas"]
    assert found.found == f"{off} is 0 here"
    assert found.fix == f"CONFIG SET {off} {settings[off]} there, too"
    assert not [one for one in of_replicas(replica, {"there": replica}) if one.check == "min-replicas"]


def test_what_sentinels_say_is_compared() -> None:
    """Two primaries; a hasty one; too few of them."""
    said = {"num-other-sentinels": "1", "quorum": "2", "down-after-milliseconds": "500", "ip": "a", "port": "1"}
    found = {
        one.check: one.found
        for one in of_sentinels([SentinelFacts("s:1", said), SentinelFacts("s:2", said | {"ip": "b"})])
    }
    assert found["primary"] == "the sentinels name different primaries: a:1 at s:1, b:1 at s:2"
    assert found["down-after"] == "down-after-milliseconds is 500"
    assert found["quorum"] == "2 sentinels watch the service"
    (alone,) = [it.found for it in of_sentinels([SentinelFacts("s:1", said | {"num-other-sentinels": "0"})])][:1]
    assert alone == "1 sentinel watches the service"
