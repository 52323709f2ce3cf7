"""A scheduler that stands by: one of several processes leads, and another takes over when it stops or dies.

- `LeaderElection` lets one process lead. Each term has a number that rises; the leader's writes carry it.
- A leader that gets SIGTERM resigns, and the next one leads immediately. After SIGKILL it leads within the ttl.
- Everybody may watch who leads: a health check, a dashboard, a client that looks for the leader.

Run ``python examples/standby.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three processes on an embedded
server; the first leader is stopped, the second one killed. Exit code 0 if each was followed by another. On your own:
``REDIS_URL=redis://… python examples/standby.py scheduler NAME``, several times.

Read more in docs/guides/leader-election.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, LeaderElection
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import Leader, Term

ELECTION, TTL = "scheduler", 2.0


async def schedule(redis: Redis, term: Term) -> None:
    """Do the leader's work as long as it leads: here, count."""
    while True:
        async with term.transaction() as tx:  # written only if this process still leads at that moment
            tx.multi()
            tx.incr(f"done in term {term.number}")
        await asyncio.sleep(0.05)


async def run_scheduler(url: str, name: str) -> None:
    """Stand for election until SIGTERM, which resigns: the next one leads immediately."""
    async with Redis.from_url(url) as redis, Coordinator(redis) as sync, sync.until_signal():
        election = LeaderElection(sync, ELECTION, label=name, ttl=TTL)
        await election.run(lambda term: schedule(redis, term))


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client() as redis, Coordinator(redis) as sync:
        processes = {
            name: await asyncio.create_subprocess_exec(sys.executable, __file__, "scheduler", name, env=at(server.url))
            for name in ("ann", "bob", "cy")
        }
        try:
            async with asyncio.timeout(60), aclosing(LeaderElection(sync, ELECTION).watch(every=0.05)) as changes:

                async def next_leader() -> Leader:
                    """Return the next one that leads; for a moment it may be nobody."""
                    while (leader := await anext(changes)) is None:
                        pass
                    return leader

                first = await next_leader()
                processes[first.label].send_signal(signal.SIGTERM)
                second = await next_leader()
                processes[second.label].kill()
                third = await next_leader()
        finally:
            for process in processes.values():
                if process.returncode is None:
                    process.kill()
                await process.wait()
    terms = [leader.term or 0 for leader in (first, second, third)]
    in_turn = len({first.label, second.label, third.label}) == 3 and terms == sorted(terms)
    print(f"three processes led, one after the other: {'yes' if in_turn else 'no'}")
    return 0 if in_turn else 1


def at(url: str) -> dict[str, str]:
    return {**os.environ, "REDIS_URL": url}


if __name__ == "__main__":
    if sys.argv[1:2] == ["scheduler"]:
        asyncio.run(run_scheduler(os.environ["REDIS_URL"], sys.argv[2]))
    else:
        sys.exit(asyncio.run(demonstrate()))
