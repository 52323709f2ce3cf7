"""Workers in several processes: one customer's jobs in order and one at a time, and a cron job that runs once.

Run ``python examples/workers.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): three processes share the work
on an embedded server for two or three seconds, one is killed in the middle of a job, and their log is
checked: exit code 0 if no rule was broken. On your own: ``REDIS_URL=… python examples/workers.py worker``, many times.

Read more in docs/recipes/workers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

from redis.asyncio import Redis

from redis_sync_aio import Coordinator, Lease, LeaseLost, wait_until
from redis_sync_aio.embedded import EmbeddedServer

CUSTOMERS, JOBS, SLOTS = ("ann", "bob", "cy"), 12, 6
TTL = 1.0  # seconds; how long a crashed process delays the waiters of its locks
PERIOD = 0.25  # seconds between two slots of the cron job

# The lock lets one process work at a time. The fence keeps out a process that has lost it without noticing it yet: the
# next holder presents its fence before it reads anything, and from then on a change under an older fence is refused.
FENCED = """
if tonumber(redis.call('GET', KEYS[1]) or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
for _, command in ipairs(cjson.decode(ARGV[2])) do redis.call(unpack(command)) end
return 1
"""


async def fenced(redis: Redis, lease: Lease, note: str, *commands: list[str]) -> None:
    """Run the commands and add a line to the log, in one step, unless a later holder of the lock was here before."""
    steps = [*commands, ["RPUSH", "log", f"{note} {os.getpid()}"]]
    if not await redis.eval(FENCED, 1, f"fence:{lease.name}", str(lease.fence), json.dumps(steps)):
        raise LeaseLost(name=lease.name, reason="taken", fence=lease.fence)


async def work(redis: Redis, sync: Coordinator) -> None:
    """Take tickets until the end. A ticket names a customer with a job; the job itself is in the customer's own queue.

    So the holder of the customer's lock does the oldest job, regardless of the order in which tickets were taken. A
    crash loses the ticket (`cron` writes new ones), but no job: the next holder of the lock does it before any later
    job.
    """
    task = asyncio.current_task()
    while task is not None and not task.cancelling():  # on Python 3.11 redis-py may swallow a cancellation
        if (ticket := await redis.blpop(["tickets"], timeout=1)) is None:
            continue
        customer = str(ticket[1])
        with suppress(LeaseLost):  # as after a crash: the job is still there, and cron writes a ticket
            async with sync.lock(f"lock:{customer}", ttl=TTL) as lease:
                await fenced(redis, lease, f"turn {customer} -")
                if job := str(await redis.lindex(f"queue:{customer}", 0) or ""):
                    await fenced(redis, lease, f"begin {customer} {job}")
                    await do(redis, job)
                    await fenced(redis, lease, f"done {customer} {job}", ["LPOP", f"queue:{customer}"])


async def do(redis: Redis, job: str) -> None:
    """Do the real work (here a sleep). One job kills its process, the first time."""
    await asyncio.sleep(0.02)
    if job == "5" and await redis.set("killed", os.getpid(), nx=True):
        os.kill(os.getpid(), signal.SIGKILL)


async def cron(redis: Redis, sync: Coordinator) -> None:
    """Wake up for every slot, as every process does. One of them runs it, exactly once.

    All wait for the lock instead of giving up when it is taken: if the winner crashes, its lease ends after TTL, and
    the next process sees that the slot is not done, and does it. The winner's work before its last step is then
    repeated, but the last step, which also records the slot, happens once. If all crash, the slot is skipped.
    """
    while True:
        await asyncio.sleep(PERIOD - time.time() % PERIOD)
        slot = round(time.time() / PERIOD)
        with suppress(LeaseLost):  # another process has taken over
            async with sync.lock("lock:cron", ttl=TTL) as lease:
                await fenced(redis, lease, f"woke cron {slot}")
                if int(await redis.get("slot") or 0) < slot:
                    # The job: new tickets for customers with jobs, as a crash loses tickets. Extra ones are harmless.
                    tickets = [["RPUSH", "tickets", key[6:]] async for key in redis.scan_iter("queue:*")]
                    await fenced(redis, lease, f"ran cron {slot}", *tickets, ["SET", "slot", str(slot)])


async def run_process(url: str) -> None:
    """Run two workers and the cron job until SIGTERM or SIGINT. A job that runs then may take two seconds to end."""
    redis = Redis.from_url(url, decode_responses=True)
    async with redis, Coordinator(redis) as sync, sync.until_signal(drain=2), asyncio.TaskGroup() as group:
        for run in (work, work, cron):
            group.create_task(run(redis, sync))


def broken_rules(log: list[list[str]], killed: str, ends: list[int]) -> Iterator[str]:
    """Check the log. It is in the order in which the server saw the events, so no clocks are compared."""
    done = [line[1:] for line in log if line[0] == "done"]
    expected = [[event, str(job)] for job in range(JOBS) for event in ("begin", "done")]
    for customer in CUSTOMERS:
        jobs = [line for line in log if line[1] == customer and line[0] in ("begin", "done")]
        if [line[:3:2] for line in jobs if line[1:] in done or line[3] != killed] != expected:
            yield f"{customer}'s jobs were not done once each, in order and one at a time: {jobs}"
    if len(slots := [line[2] for line in log if line[0] == "ran"]) != len(set(slots)):
        yield f"a slot of the cron job ran twice: {slots}"
    if ends != [-signal.SIGKILL, 0, 0]:
        yield f"one process should be killed, and the others end cleanly: {ends}"


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client(decode_responses=True) as redis:
        for customer in CUSTOMERS:
            await redis.rpush(f"queue:{customer}", *range(JOBS))
        await redis.rpush("tickets", *CUSTOMERS * JOBS)

        async def complete_log() -> list[list[str]]:
            log = [str(line).split() for line in await redis.lrange("log", 0, -1)]
            events = [line[0] for line in log]
            finished = events.count("done") >= JOBS * len(CUSTOMERS) and events.count("ran") >= SLOTS
            all_began = len({line[-1] for line in log}) == len(workers)
            return log if finished and all_began else []

        os.environ["REDIS_URL"] = server.url
        workers = [await asyncio.create_subprocess_exec(sys.executable, __file__, "worker") for _ in range(3)]
        try:
            log = await wait_until(complete_log, timeout=30)
        finally:
            for worker in workers:
                if worker.returncode is None:
                    worker.terminate()
            ends = sorted([await worker.wait() for worker in workers])
        killed = str(await redis.get("killed"))
    for name in (*CUSTOMERS, "cron"):
        print(name, *(f"{line[2]}:{line[3]}" for line in log if line[1] == name and line[0] in ("done", "ran")))
    broken = list(broken_rules(log, killed, ends))
    print(f"process {killed} was killed in the middle of job 5", *broken or ["no rule was broken"], sep="\n")
    return len(broken)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        asyncio.run(run_process(os.environ["REDIS_URL"]))
    else:
        sys.exit(asyncio.run(demonstrate()))
