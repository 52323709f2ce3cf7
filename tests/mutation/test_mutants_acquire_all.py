"""Mutants of lock/acquire_all.lua: each takes one decision out, and at least one of its script tests has to notice."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..scripts import test_acquire_all as suite
from ..support.inside import Script, load
from ..support.script_mutants import mutated

pytestmark = pytest.mark.real

MUTANTS: dict[str, tuple[str, str]] = {
    "takes what is free although one is taken": ("ipairs(all and free or {})", "ipairs(free)"),
    "takes what others hold": ("elseif not holder and not granted and settle(", "elseif not granted and settle("),
    "takes nothing at all": ("ipairs(all and free or {})", "ipairs({})"),
    "barges": ("settle('', heads()) == FREE then\n    answers", "true then\n    answers"),
    "a spent token is granted again": ("not holder and not granted and settle(", "not holder and settle("),
    "a spent token is just busy": ("not holder and granted and 4 or 0", "0"),
    "a replay begins the ttl again": ("if holder == token then\n", "if holder == token then hold(token, ttl)\n"),
    "a replay takes a new fence": (
        "granted and string.sub(last, 1, 16) or next_fence(token, ttl)",
        "next_fence(token, ttl)",
    ),
    "a replay takes back what was lost": ("else\n    all = false", "else"),
    "all locks are the first": ("turn_to(i)\n  answers[i] = tonumber", "turn_to(1)\n  answers[i] = tonumber"),
    "only the first is looked at": ("turn_to(i)\n  local holder", "turn_to(1)\n  local holder"),
    "all have one token": ("ARGV[2] .. number", "ARGV[2] .. '1'"),
    "the holder is not written": ("  hold(tokens[i], ttl)\n", ""),
    "the remaining time is not told": ("0, redis.call('PTTL', NAME), now, 0}\n  end", "0, -2, now, 0}\n  end"),
}


def mutate(old: str, new: str) -> Callable[[str], Script]:
    def loaded(name: str) -> Script:
        return mutated(name, old, new) if name == "lock/acquire_all" else load(name)

    return loaded


def checks() -> list[Callable[[Redis], Awaitable[None]]]:
    found: list[Callable[[Redis], Awaitable[None]]] = []
    for name, value in vars(suite).items():
        if name.startswith("test_") and inspect.iscoroutinefunction(value):
            parameters = list(inspect.signature(value).parameters)
            if parameters == ["redis"]:
                found.append(value)
    found += [partial(suite.test_p1_one_that_is_taken_keeps_the_others_free, taken=taken) for taken in range(3)]
    return found


async def noticed(redis: Redis) -> bool:
    for check in checks():
        await redis.flushall()
        try:
            await check(redis)
        # Whatever a broken script does to a check. Failed is what pytest.raises raises.
        except (AssertionError, TypeError, ValueError, AttributeError, RedisError, pytest.fail.Exception):
            return True
    return False


async def test_the_script_passes_every_check(redis: Redis) -> None:
    assert not await noticed(redis)
    assert len(checks()) >= 10


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_every_mutant_is_caught(redis: Redis, monkeypatch: pytest.MonkeyPatch, mutant: tuple[str, str]) -> None:
    loader = mutate(*mutant)
    await redis.script_load(loader("lock/acquire_all").source.decode())  # raises if it is no Lua any more
    monkeypatch.setattr(suite, "load", loader)
    assert await noticed(redis), "no check notices"
