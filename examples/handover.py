"""A web request takes a lock and a worker releases it: the lease is detached, and travels with the job.

- `accept` is what the API does with a request: it takes the order's lock, detaches the lease, and queues a job with the
  token. A second request for the order is refused until the worker is done, also when the API has long ended.
- `work` is the worker: it attaches the lease, does the job under it, and releases it. A message that is delivered twice
  does no harm, since a token can be attached once.

Run ``python examples/handover.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): one process accepts, and ends,
before another one works. Exit code 0 if each order was worked on once, under the lease that was taken for it. On your
own server: ``REDIS_URL=… python examples/handover.py api``, and then ``… worker``.

Read more in docs/recipes/workers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, NotHeld
from redis_sync_aio.embedded import EmbeddedServer

ORDERS = ("41", "42", "43")
WAITS = 600  # seconds; how long a job may wait for a worker before its order is free again


async def accept(redis: Redis, sync: Coordinator, order: str) -> bool:
    """Take the order's lock, and queue its job. False: a job for this order waits or runs already."""
    lease = await sync.lock(f"order:{order}").try_acquire()
    if lease is None:
        return False
    job = {"order": order, "lock": await lease.detach(ttl=WAITS)}
    await redis.rpush("jobs", json.dumps(job))  # if this fails, the order is free again after WAITS
    await redis.rpush("log", f"accepted {order} {lease.fence}")
    return True


async def work(redis: Redis, sync: Coordinator) -> None:
    """Do the jobs that are queued, each under the lease that came with it."""
    while (found := await redis.lpop("jobs")) is not None:
        job = json.loads(str(found))
        order = job["order"]
        try:
            lease = await sync.lock(f"order:{order}").attach(job["lock"])
        except NotHeld:  # another worker has it, or it waited for too long: the order may be in other hands
            await redis.rpush("log", f"passed {order}")
            continue
        async with lease:
            await asyncio.sleep(0.02)  # the real work
            await redis.rpush("log", f"worked {order} {lease.fence}")


async def run_api(redis: Redis, sync: Coordinator) -> None:
    for order in ORDERS:
        answers = [await accept(redis, sync, order) for _ in range(2)]
        print(f"order {order}:", *("accepted" if answer else "busy" for answer in answers))


async def run_process(url: str, role: str) -> None:
    redis = Redis.from_url(url, decode_responses=True)
    async with redis, Coordinator(redis) as sync:
        await (run_api if role == "api" else work)(redis, sync)


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client(decode_responses=True) as redis:
        environment = {**os.environ, "REDIS_URL": server.url}
        for role in ("api", "worker"):
            process = await asyncio.create_subprocess_exec(sys.executable, __file__, role, env=environment)
            if await process.wait():
                return 1
            if role == "api":  # its process has ended; a message comes twice
                await redis.rpush("jobs", str(await redis.lindex("jobs", 0)))
        log = [str(line) for line in await redis.lrange("log", 0, -1)]
        free = [await redis.exists(f"order:{order}") == 0 for order in ORDERS]
    accepted, worked = ([line.split()[1:] for line in log if line.startswith(what)] for what in ("accepted", "worked"))
    passed = [line for line in log if line.startswith("passed")]
    kept = accepted == worked and [order for order, _ in worked] == list(ORDERS) and all(free)
    print("each order was worked on once, under its own lease:", "yes" if kept else log)
    print("messages that came twice and were passed over:", len(passed))
    return 0 if kept and len(passed) == 1 else 1


if __name__ == "__main__":
    if sys.argv[1:] in (["api"], ["worker"]):
        asyncio.run(run_process(os.environ["REDIS_URL"], sys.argv[1]))
    else:
        sys.exit(asyncio.run(demonstrate()))
