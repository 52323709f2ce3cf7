"""The connection of a coordinator says in CLIENT LIST whose it is, and never fails for that."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, __version__
from tests.conftest import MakeClient

HERE = f"redis_sync_aio:{socket.gethostname()[:32]}:{os.getpid()}"
OURS = f"redis_sync_aio_v{__version__}"


async def connections(redis: Redis) -> list[dict[str, str]]:
    """Return the connections that listen to channels, as CLIENT LIST shows them."""
    client: Any = redis
    return [one for one in await client.client_list() if one["sub"] != "0"]


async def used(client: Redis) -> Coordinator:
    """Return a coordinator whose connection is in use."""
    sync = Coordinator(client)
    async with sync.lock("x"):
        return sync


async def test_it_has_a_name_and_the_library(redis: Redis, make_client: MakeClient) -> None:
    """Host and process as in the tokens, so a holder's connection can be found; redis-py with this package on it."""
    sync = await used(make_client())
    (ours,) = await connections(redis)
    assert ours["name"] == HERE
    assert "lib-name" not in ours or OURS in ours["lib-name"]  # Redis before 7.2 knows no libraries
    await sync.aclose()


async def test_the_callers_own_name_and_library_stay(redis: Redis, make_client: MakeClient) -> None:
    """What the client says counts: its name, its driver next to this package, or no library at all."""
    driver_info = pytest.importorskip("redis.driver_info", reason="redis-py before 7.2 has only lib_name")
    info = driver_info.DriverInfo().add_upstream_driver("my-service", "7.1")
    sync = await used(make_client(client_name="mine", driver_info=info))
    (ours,) = await connections(redis)
    assert ours["name"] == "mine"
    assert "lib-name" not in ours or "my-service_v7.1" in ours["lib-name"]
    assert info.upstream_drivers == ["my-service_v7.1"]  # the caller's object is left alone
    await sync.aclose()


@pytest.mark.skipif(importlib.util.find_spec("redis.driver_info") is not None, reason="for redis-py before 7.2")
async def test_the_callers_own_library_stays_with_older_versions(redis: Redis, make_client: MakeClient) -> None:
    """The name that the client gives its library counts."""
    sync = await used(make_client(client_name="mine", lib_name="my-service"))
    (ours,) = await connections(redis)
    assert ours["name"] == "mine"
    assert ours.get("lib-name", "my-service") == "my-service"
    await sync.aclose()


async def test_a_client_that_wants_no_introduction_gets_none(redis: Redis, make_client: MakeClient) -> None:
    """Neither a name nor a library."""
    nothing = {"driver_info": None} if importlib.util.find_spec("redis.driver_info") else {"lib_name": None}
    sync = await used(make_client(**nothing))
    (ours,) = await connections(redis)
    assert (ours["name"], ours.get("lib-name", "")) == ("", "")
    await sync.aclose()


@pytest.mark.parametrize("refused", ["-client", "-client|setname -client|setinfo"])
async def test_rights_that_refuse_it_are_no_failure(redis: Redis, make_client: MakeClient, refused: str) -> None:
    """The coordinator works as before, and its connection has no name."""
    admin: Any = redis
    rights = ["on", ">secret", "~*", "&*", "+@all", *refused.split()]
    if "|" in refused and not (await admin.info("server"))["redis_version"] > "7":
        pytest.skip("Redis 6.2 cannot refuse a subcommand")
    await admin.execute_command("ACL", "SETUSER", "nameless", "reset", *rights)
    sync = await used(make_client(username="nameless", password="secret"))
    (ours,) = await connections(redis)
    assert ours["name"] == ""
    await sync.aclose()
    await admin.execute_command("ACL", "DELUSER", "nameless")


@pytest.mark.real
async def test_it_takes_no_round_trip(redis: Redis, make_client: MakeClient) -> None:
    """The name is set between commands that are sent together: nothing of this process comes in between."""
    admin: Any = redis
    if (await admin.info("server"))["redis_version"] < "7":
        pytest.skip("MONITOR of Redis 6.2 does not show CLIENT")
    sent = []
    async with make_client().monitor() as monitor:
        sync = await used(make_client())
        await redis.echo("the end")
        while (command := await monitor.next_command())["command"] != "ECHO the end":
            sent.append(command["command"].partition(" ")[0:3:2])
    words = [" ".join(one).upper() for one in sent]
    names = [index for index, one in enumerate(words) if one.startswith("CLIENT SETNAME")]
    assert len(names) == 1
    assert words[names[0] - 1].startswith("INFO")  # sent in the same write
    await sync.aclose()
