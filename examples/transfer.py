"""Transfers between accounts: a multi-lock over both, named in any order, and a fence for each.

Run ``python examples/transfer.py`` (needs ``pip install 'redis_sync_aio[embedded]'``): 40 tasks, half of them on
another connection like a second process, move money between five accounts of an embedded server. Each transfer
reads two balances, works a while, and writes both. Exit code 0 if no money was lost or made.

Read more in docs/guides/reentrant-and-multi.md.
"""

from __future__ import annotations

import asyncio
import random
import sys

from redis.asyncio import Redis

from redis_sync_aio import AsyncMultiLock, Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.types import MultiLease

ACCOUNTS, START, TRANSFERS = ("ann", "bob", "cy", "dee", "eve"), 100, 10

# Both balances are written, or none: if the locks were lost in the meantime, the fence of either account refuses the
# transfer.
WRITE = """
for i = 1, 2 do
  if tonumber(redis.call('HGET', KEYS[i], 'fence') or 0) > tonumber(ARGV[2 * i]) then return 0 end
end
for i = 1, 2 do redis.call('HSET', KEYS[i], 'balance', ARGV[2 * i - 1], 'fence', ARGV[2 * i]) end
return 1
"""


class NotEnough(Exception):
    """The account does not have that much."""


async def balance(redis: Redis, account: str) -> int:
    return int(await redis.hget(f"account:{account}", "balance") or 0)


async def transfer(redis: Redis, sync: Coordinator, payer: str, payee: str, amount: int) -> None:
    """Move ``amount``. Transfers from ``ann`` to ``bob`` and back at the same time do not deadlock."""
    names = {payer: f"lock:{payer}", payee: f"lock:{payee}"}
    async with AsyncMultiLock(sync, names.values()).acquire(timeout=30) as lease:
        left, sum_ = await balance(redis, payer) - amount, await balance(redis, payee) + amount
        if left < 0:
            raise NotEnough(f"{payer} does not have {amount}")
        await asyncio.sleep(0.001)  # stands for the real work
        await write(redis, lease, {payer: left, payee: sum_}, names)


async def write(redis: Redis, lease: MultiLease, balances: dict[str, int], names: dict[str, str]) -> None:
    """Write the balances, unless a later holder of one of the locks has already written."""
    keys = [f"account:{account}" for account in balances]
    values = [str(value) for account in balances for value in (balances[account], lease.fences[names[account]])]
    if not await redis.eval(WRITE, 2, *keys, *values):
        raise LeaseLost(name=lease.name, reason="taken", fence=lease.fence)


async def customer(redis: Redis, sync: Coordinator, seed: int) -> int:
    """Make some transfers; return how many were refused for lack of money."""
    chance, refused = random.Random(seed), 0
    for _ in range(TRANSFERS):
        payer, payee = chance.sample(ACCOUNTS, 2)
        try:
            await transfer(redis, sync, payer, payee, chance.randint(1, 40))
        except NotEnough:
            refused += 1
    return refused


async def demonstrate() -> int:
    async with EmbeddedServer() as server, server.client() as redis, server.client() as other:
        for account in ACCOUNTS:
            await redis.hset(f"account:{account}", "balance", str(START))
        async with Coordinator(redis) as one, Coordinator(other) as two:
            refused = await asyncio.gather(*(customer(redis, (one, two)[seed % 2], seed) for seed in range(40)))
        balances = {account: await balance(redis, account) for account in ACCOUNTS}
    total = sum(balances.values())
    print(*(f"{account}:{money}" for account, money in balances.items()))
    print(f"{40 * TRANSFERS - sum(refused)} transfers, {sum(refused)} refused; the sum is {total}")
    return 0 if total == START * len(ACCOUNTS) and min(balances.values()) >= 0 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(demonstrate()))
