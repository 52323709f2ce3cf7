"""``--prefix``: a tenant of a shared server looks at, takes and ends its own locks with the rights on its own keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.inspecting import seen
from ..support.programs import command, command_process
from ..support.rights import CREDENTIALS, PREFIX, TENANT
from .terminals import terminal

pytestmark = pytest.mark.real

REFUSED = 77
USER = {"REDIS_USERNAME": "tenant", "REDIS_PASSWORD": "secret"}


@pytest_asyncio.fixture
async def mine(redis: Redis, make_client: MakeClient) -> AsyncIterator[Coordinator]:
    """A coordinator of a user that may use nothing but keys and channels with the prefix."""
    admin: Any = redis
    await admin.execute_command("ACL", "SETUSER", "tenant", *TENANT)
    async with Coordinator(make_client(**CREDENTIALS), prefix=PREFIX) as tenant:
        yield tenant
    await admin.execute_command("ACL", "DELUSER", "tenant")


@pytest.fixture
def ran(server: EmbeddedServer) -> Callable[..., Any]:
    """Run a command as the tenant while the event loop goes on."""

    async def run(name: str, *words: str) -> Any:
        return await asyncio.to_thread(command, name, "--prefix", PREFIX, "--url", server.url, *words, **USER)

    return run


@pytest.mark.ci
async def test_ls_and_show_tell_the_names_of_the_tenant_only(
    mine: Coordinator, sync: Coordinator, ran: Callable[..., Any]
) -> None:
    """As the tenant wrote them; the same names of others are other locks."""
    async with sync.lock("orders"), sync.lock("hidden"):
        async with mine.lock("orders") as lease, mine.semaphore("slots:{1}", limit=3).acquire(weight=2):
            listed = await ran("ls", "--json")
            assert [(it["name"], it["kind"]) for it in json.loads(listed.stdout)["names"]] == [
                ("orders", "lock"),
                ("slots:{1}", "semaphore"),
            ]
            (shown,) = json.loads((await ran("show", "orders", "--json")).stdout)["names"]
            assert [it["token"] for it in shown["holders"]] == [lease.token]
            assert PREFIX not in (await ran("ls")).stdout
        unknown = await ran("show", "hidden")
        assert (unknown.returncode, unknown.stdout) == (1, "nothing is known of 'hidden'\n")


async def test_release_ends_the_lease_of_the_tenant_and_wakes_the_next(
    redis: Redis, mine: Coordinator, sync: Coordinator, make_client: MakeClient, ran: Callable[..., Any]
) -> None:
    """And not the lock of that name of somebody else."""
    async with sync.lock("x"), Coordinator(make_client(**CREDENTIALS), prefix=PREFIX) as other:
        lease = await mine.lock("x").acquire()
        waiting = asyncio.create_task(other.lock("x").acquire())
        await seen(redis, f"{PREFIX}{{x}}", lambda it: len(it.waiters) == 1)
        done = await ran("release", "x", "--yes")
        assert (done.returncode, done.stdout.partition(":")[0]) == (0, "released"), done.stderr
        granted = await waiting
        assert granted.fence > lease.fence
        with pytest.raises(LeaseLost):
            await lease.extend(30)
        await granted.release()


@pytest.mark.ci
@pytest.mark.parametrize("live", ["top", "watch"])
async def test_live_views_show_the_tenants_names(
    mine: Coordinator, sync: Coordinator, server: EmbeddedServer, live: str
) -> None:
    options = ("--prefix", PREFIX, "--interval", "0.05", "--url", server.url)
    async with sync.lock("hidden"):
        with terminal(live, *options, columns=200, REDIS_USERNAME="tenant", REDIS_PASSWORD="secret") as it:
            async with mine.lock("seen"):
                await asyncio.to_thread(it.shows, "seen")
            it.types("\x03")
            await asyncio.to_thread(it.end)
            assert "hidden" not in it.screen


@pytest.mark.ci
async def test_run_takes_the_lock_of_the_tenant_and_none_without_the_prefix(
    mine: Coordinator, sync: Coordinator, server: EmbeddedServer, ran: Callable[..., Any]
) -> None:
    """It is free while another holds the same name without the prefix. A prefix that cannot be one is wrong usage."""
    job = ("job", "--", "echo", "it ran")
    async with sync.lock("job"), mine.lock("job", ttl=3600):
        busy = await ran("run", "--timeout", "0", *job)
        assert (busy.returncode, busy.stdout) == (1, ""), busy.stderr
        assert "'job' is held by others" in busy.stderr
    async with sync.lock("job"):
        words = ("run", "--prefix", PREFIX, "--url", server.url, *job)
        done = await asyncio.to_thread(command_process, *words, **USER)
        assert (done.returncode, done.stdout) == (0, "it ran\n"), done.stderr
    done = await asyncio.to_thread(command, "run", "--url", server.url, *job, **USER)
    assert (done.returncode, done.stdout) == (REFUSED, ""), done.stderr
    for prefix in ("app1", "{app}:", "app*:"):
        done = await asyncio.to_thread(command, "ls", "--prefix", prefix, "--url", server.url)
        assert done.returncode == 2
        assert "prefix must consist of" in done.stderr
