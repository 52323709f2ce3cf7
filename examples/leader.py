"""A leader among workers that outlives a server: the lock runs on three servers, and one of them may fail.

- The holder of the lock leads; the others queue for it. The leader's actions carry its fence.
- When a server is killed, the leader goes on. When the leader is killed, the next one leads once its lease has ended.

Run ``python examples/leader.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three workers on three embedded
servers; one server and then the leader are killed. Exit code 0 if there was always exactly one leader. On your own
servers: ``LOCKS="redis://… redis://… redis://…" JOURNAL=redis://… python examples/leader.py worker``, many times.

Read more in docs/guides/redlock.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, ExitStack
from itertools import pairwise

from redis.asyncio import Redis

from redis_sync_aio import AsyncRedlock, Coordinator, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import RedlockLease

TTL = 1.0


async def lead(lease: RedlockLease, journal: Redis) -> None:
    """Do the leader's work as long as it leads: here, write to a journal."""
    while True:
        lease.check()
        await journal.rpush("beats", f"{lease.fence} {os.getpid()}")
        await asyncio.sleep(0.02)


async def run_worker(servers: list[str], journal: str) -> None:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(Redis.from_url(journal))
        clients = [await stack.enter_async_context(Redis.from_url(url)) for url in servers]
        lock = AsyncRedlock(
            [await stack.enter_async_context(Coordinator(client)) for client in clients], "leader", ttl=TTL
        )
        while True:
            try:
                async with lock as lease:
                    await lead(lease, log)
            except LeaseLost as error:  # no majority holds it any more: another worker may lead now
                print(error, file=sys.stderr)


async def demonstrate() -> int:
    with ExitStack() as servers:
        three = [servers.enter_context(EmbeddedServer()) for _ in range(3)]
        fourth = servers.enter_context(EmbeddedServer())  # the journal that the leader writes
        environment = {**os.environ, "LOCKS": " ".join(server.url for server in three), "JOURNAL": fourth.url}
        workers = [
            await asyncio.create_subprocess_exec(sys.executable, __file__, "worker", env=environment) for _ in range(3)
        ]
        try:
            async with fourth.client(decode_responses=True) as journal:

                async def beats() -> list[tuple[int, int]]:
                    lines = [line.split() for line in await journal.lrange("beats", 0, -1)]
                    return [(int(fence), int(pid)) for fence, pid in lines]

                async def so_many(number: int) -> bool:
                    return len(await beats()) >= number

                await wait_until(lambda: so_many(10), timeout=30)
                fence, leader = (await beats())[-1]
                three[0].kill()
                before = len(await beats())
                await wait_until(lambda: so_many(before + 50), timeout=30)  # for the length of a ttl
                same = all(beat == (fence, leader) for beat in await beats())
                print(f"a server was killed, {'and the leader went on' if same else 'and with it the leader'}")

                os.kill(leader, signal.SIGKILL)

                async def another() -> bool:
                    return (await beats())[-1][0] > fence

                await wait_until(another, timeout=30)
                await wait_until(lambda: so_many(before + 100), timeout=30)
                rising = all(one <= two for (one, _), (two, _) in pairwise(await beats()))
                print(f"the leader was killed, and another leads; fences {'rise' if rising else 'do not rise'}")
        finally:
            for worker in workers:
                if worker.returncode is None:
                    worker.kill()
                await worker.wait()
    return 0 if same and rising else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(run_worker(os.environ["LOCKS"].split(), os.environ["JOURNAL"]))
    else:
        sys.exit(asyncio.run(demonstrate()))
