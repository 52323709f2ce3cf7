"""Tools for tests of the permit scripts: run them, fill the keys, read the keys and what is pushed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from ..support.inside import load as load
from ..support.inside import permit_keys, ticket_member
from ..support.script_mutants import Client as Client

KEYS = permit_keys(b"s", "sem")
PERMITS, STATE, QUEUE, POLLS = KEYS.all
TTL = 30_000
POLL_MS = 60_000
ALIVE, OTHER, DEAD = b"rsa:alive", b"rsa:other", b"rsa:dead"
A1, A2, B3 = b"host:1:a:1~", b"host:1:a:2~", b"host:2:b:3~"
"""Tokens of processes that share: they end as ``:<hex of the inbox>:<number>~``."""
AT_A, AT_B = b"rsa:a", b"rsa:b"
LIKE_IT = (b"t~", b"host:a:1", b"host:x:1~", b"host:a:1~ ", b"a:1~", b"host:a:~", b"host::1~", b"~")
BUSY, GRANTED, QUEUED, OWN, SPENT, MISMATCH, TOO_HEAVY = range(7)
FILL = """
for i = 1, ARGV[1] do
  redis.call('ZADD', KEYS[1], ARGV[2], 'filler' .. i)
  redis.call('HSET', KEYS[2], '=filler' .. i, '1 ' .. i)
end
redis.call('HSET', KEYS[2], 'limit', ARGV[3], 'used', ARGV[1], 'fence', ARGV[1])
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[2], 3600000)
"""
FAR = 1 << 52  # microseconds: long after these tests


async def run(redis: Client, script: str, *arguments: bytes | int) -> Any:
    return await redis.eval(load(script).source, 4, *KEYS.all, *arguments)


async def ask(
    redis: Client, token: bytes, ticket: bytes = b"", *, weight: int = 1, limit: int = 2, ttl: int = TTL
) -> Any:
    """Acquire; a ticket without an inbox is polled for."""
    poll_ms = POLL_MS if ticket.startswith(b"|") else 0
    return await run(redis, "permits/acquire", token, ttl, ticket, poll_ms, weight, limit)


async def granted(redis: Client, token: bytes, ticket: bytes = b"", *, weight: int = 1, limit: int = 2) -> int:
    """Acquire, and it must be granted."""
    reply = await ask(redis, token, ticket, weight=weight, limit=limit)
    fence = reply[1] if isinstance(reply, list) and reply[0] == GRANTED else reply  # a list: a writer
    assert isinstance(fence, int), reply
    return fence


async def waits(redis: Client, token: bytes, inbox: bytes = ALIVE, *, weight: int = 1, limit: int = 2) -> bytes:
    """Acquire, and it must be queued; return the ticket."""
    ticket = ticket_member(inbox, await redis.zcard(QUEUE) + 1, 20_000, token, weight)
    assert (await ask(redis, token, ticket, weight=weight, limit=limit))[0] == QUEUED
    return ticket


async def release(redis: Client, token: bytes, ticket: bytes = b"", *, pending: bool = False) -> int:
    found = await run(redis, "permits/release", token, ticket, int(pending))
    assert isinstance(found, int)
    return found


async def renew(redis: Client, token: bytes, ttl: int = TTL, least: int = 1) -> int:
    """Renew what weighs so much at ``least``."""
    found = (await run(redis, "permits/renew", token, ttl, least))[0]
    assert isinstance(found, int)
    return found


async def resize(redis: Client, limit: int) -> Any:
    return await run(redis, "permits/resize", limit)


async def expire(redis: Client, *tokens: bytes) -> None:
    """Let leases be over, as if their time had passed."""
    await redis.zadd(PERMITS, dict.fromkeys(tokens, 1), xx=True)


async def holders(redis: Client) -> dict[bytes, int]:
    """Return who holds how much. The sum that is kept has to be exact, and there are no tombstones without a permit."""
    state = await redis.hgetall(STATE)
    weights = {token[1:]: int(value.split()[0]) for token, value in state.items() if token.startswith(b"=")}
    assert set(weights) == set(await redis.zrange(PERMITS, 0, -1))
    assert sum(weights.values()) == int(state.get(b"used", 0))
    return {token: weight for token, weight in weights.items() if weight}


async def everything(redis: Client) -> Any:
    """Return all that is stored."""
    scores = [await redis.zrange(key, 0, -1, withscores=True) for key in (PERMITS, QUEUE, POLLS)]
    return scores, await redis.hgetall(STATE)


async def dump(redis: Client) -> dict[bytes, bytes]:
    """Return every key, but for remaining times."""
    return {key: await redis.dump(key) for key in await redis.keys()}


async def check_kept(redis: Client, ms: int) -> None:
    """The keys of the permits live longer than ``ms`` from now, and STATE not less long (but for this reading)."""
    permits, state = await redis.pttl(PERMITS), await redis.pttl(STATE)
    assert ms + 1000 < permits <= state + 1000


async def fill(redis: Client, number: int, limit: int, until: int = FAR) -> None:
    """Let ``number`` others hold a permit each."""
    await redis.eval(FILL, 2, PERMITS, STATE, number, until, limit)


Told: TypeAlias = Callable[[], Awaitable[list[tuple[bytes, ...]]]]


@asynccontextmanager
async def inbox(redis: Client, *names: bytes) -> AsyncIterator[Told]:
    """Listen, as the owners of tickets do; yield a function that returns the messages since its last call."""
    names = names or (ALIVE,)
    async with redis.pubsub() as pubsub:
        for name in names:
            await pubsub.subscribe(name)
            assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"

        async def told() -> list[tuple[bytes, ...]]:
            await redis.publish(names[0], "the end")
            found: list[tuple[bytes, ...]] = []
            while (message := await pubsub.get_message(timeout=5))["data"] != b"the end":
                found.append(tuple(message["data"].split()))
            return found

        yield told


async def commands(redis: Client) -> int:
    """Return how many commands the server has executed since CONFIG RESETSTAT, also those inside scripts."""
    stats = await redis.info("commandstats")
    ours = {"cmdstat_info", "cmdstat_config|resetstat"}
    return sum(entry["calls"] for name, entry in stats.items() if name not in ours)


def wanted(messages: list[tuple[bytes, ...]]) -> list[bytes]:
    """Return the numbers in the messages, which have to say that somebody waits, and nothing else."""
    for _, fence, time, duration in messages:
        assert (fence, len(time), duration) == (b"-2", 16, b"0")
    return [message[0] for message in messages]
