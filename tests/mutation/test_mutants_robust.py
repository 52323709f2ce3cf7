"""Mutants of the scripts of robust locks and of the gate: their script tests have to notice every one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..scripts import test_robust_scripts as suite
from ..support.inside import Script, load
from ..support.script_mutants import mutated

pytestmark = pytest.mark.real


class Mutant(NamedTuple):
    """In the script of that name replace ``old`` by ``new``."""

    script: str
    old: str
    new: str = ""


NOT_OURS = "if holder ~= ARGV[1] then"
OUTDATED = "if last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence then return {2, now} end"
WRONG = "if found[1] and not sound or not found[1] and redis.call('PTTL', RECORD) ~= -2 then"
KEEP = "redis.call('PEXPIRE', RECORD, record_ttl(ARGV[%d]))"
MUTANTS: dict[str, Mutant] = {
    # adopt
    "anybody adopts": Mutant("robust/adopt", NOT_OURS, "if not holder then"),
    "adopts what is gone": Mutant("robust/adopt", NOT_OURS, "if holder and holder ~= ARGV[1] then"),
    "a late copy of an identity adopts": Mutant("robust/adopt", OUTDATED),
    "a replay takes itself for abandoned": Mutant("robust/adopt", "found[2] == fence\n", "false\n"),
    "an identity is not told of its own crash": Mutant(
        "robust/adopt", "found[1] == token and found[2] == fence\n", "found[1] == token\n"
    ),
    "a later adoption keeps the writer": Mutant(
        "robust/adopt", "writers == '' and writer or writers .. ' ' .. writer", "writers"
    ),
    "an earlier adoption is repeated": Mutant("robust/adopt", "if known and latest ~= writer then return {3, now} end"),
    "an earlier lease adopts as if it were new": Mutant(
        "robust/adopt", "' ' .. writer .. ' ', 1, true)", "' ' .. writer .. ' $', 1, false)"
    ),
    "each adoption of an identity counts from the beginning": Mutant(
        "robust/adopt", "tonumber(seq), found[7]", "0, found[7]"
    ),
    "the list of writers grows": Mutant("robust/adopt", "if #writers + #writer >= 832 then", "if false then"),
    "the list of writers is short": Mutant("robust/adopt", ">= 832", ">= 99"),
    "a withdrawn adoption stays": Mutant(
        "robust/adopt", "redis.call('HSET', RECORD, 'writers', writer .. ' ' .. others)"
    ),
    "a withdrawn adoption is forgotten": Mutant("robust/adopt", "writer .. ' ' .. others)", "others)"),
    "the only adoption is withdrawn": Mutant("robust/adopt", "'^(.+) %S+$')", "'^(.+) %S+$') or ''"),
    "a withdrawal adopts": Mutant("robust/adopt", "if ARGV[5] == '1' then", "if false then"),
    "any record is adopted": Mutant("robust/adopt", WRONG, "if false then"),
    "any fence is ours": Mutant("robust/adopt", "number(found[2], 16, 16) and "),
    "any time is ours": Mutant("robust/adopt", "number(found[3], 16, 16) and "),
    "any number is ours": Mutant("robust/adopt", " and number(found[6], 1, 15)"),
    "numbers may be long": Mutant("robust/adopt", "#text <= most and"),
    "numbers may be short": Mutant("robust/adopt", "#text >= least and"),
    "numbers may be text": Mutant("robust/adopt", "string.match(text, '^%d+$')", "true"),
    "a replay finds nobody": Mutant("robust/adopt", "seq = ARGV[4], found[4] or ''", "seq = ARGV[4], ''"),
    "the predecessor is not told": Mutant("robust/adopt", "found[1] and found[2] .. ' '", "false and found[2] .. ' '"),
    "the predecessor's own predecessor is told": Mutant(
        "robust/adopt",
        "before = found[1] and found[2] .. ' ' .. found[3] .. ' ' .. found[1]",
        "before = before",
    ),
    "the predecessor is not remembered": Mutant("robust/adopt", "'before', before,", "'before', '',"),
    "the fence is not written": Mutant("robust/adopt", "'fence', fence, ", ""),
    "adopting keeps the older number": Mutant("robust/adopt", "seq = '0'", "seq = seq"),
    "adopting forgets the progress": Mutant("robust/adopt", "'seq', seq)", "'seq', seq, 'progress', '')"),
    "an identity that joins forgets the progress": Mutant(
        "robust/adopt", "writers .. ' ' .. writer)", "writers .. ' ' .. writer, 'progress', '')"
    ),
    "the time of the record stands still": Mutant("robust/adopt", "'at', at, ", "'at', found[3] or at, "),
    "a new record has no ttl": Mutant("robust/adopt", "  end\n  " + KEEP % 3, "  end"),
    "a record lasts as long as the lease": Mutant("robust/adopt", "604800000 + remember(ms)", "remember(ms)"),
    "a record lasts a week whatever the ttl": Mutant("robust/adopt", "604800000 + remember(ms)", "604800001"),
    # record
    "anybody records": Mutant("robust/record", NOT_OURS, "if not holder then"),
    "records what is gone": Mutant("robust/record", NOT_OURS, "if holder and holder ~= ARGV[1] then"),
    "who finds it gone wakes nobody": Mutant("robust/record", "settle('', heads())\n  return {0", "return {0"),
    "a late copy of an identity records": Mutant("robust/record", OUTDATED),
    "a late copy overwrites": Mutant("robust/record", "tonumber(found[6]) > tonumber(ARGV[5])", "false"),
    "numbers as text": Mutant("robust/record", "tonumber(found[6]) > tonumber(ARGV[5])", "found[6] > ARGV[5]"),
    "an earlier lease of the identity records": Mutant("robust/record", "then return {3, now} end", "then end"),
    "nobody records when the record was evicted": Mutant("robust/record", "writers ~= '' and ", ""),
    "a lease that records when it was evicted is not the writer": Mutant(
        "robust/record", "writers == '' and ARGV[8] or writers", "writers"
    ),
    "what is refused renews": Mutant(
        "robust/record", "local same = found", "redis.call('PEXPIRE', NAME, ARGV[3]) local same = found"
    ),
    "any record is written": Mutant("robust/record", WRONG, "if false then"),
    "nothing is recorded": Mutant("robust/record", "'progress', ARGV[6], "),
    "no steps are recorded": Mutant("robust/record", ", 'undo', ARGV[7]"),
    "the number is not recorded": Mutant("robust/record", "'seq', ARGV[5], "),
    "the predecessor stays": Mutant("robust/record", "'before', '',"),
    "recording always renews": Mutant("robust/record", "if ttl ~= '0' then", "do"),
    "recording never renews": Mutant("robust/record", "if ttl ~= '0' then", "if false then"),
    "recording forgets the fence": Mutant("robust/record", "redis.call('PEXPIRE', FENCE, keep)"),
    "recording does not keep the record": Mutant("robust/record", KEEP % 4),
    "a foreign key is found too late": Mutant(
        "robust/record",
        "local found = redis",
        "redis.call('PEXPIRE', NAME, ARGV[4]) local found = redis",
    ),
    # renew
    "renewing does not keep the record": Mutant(
        "lock/renew", "redis.call('PEXPIRE', record, 604800000 + remember(ttl))"
    ),
    "renewing keeps any record": Mutant("lock/renew", "redis.pcall('HMGET', record, 'token')[1] == holder", "true"),
    "renewing stops at a foreign record": Mutant("lock/renew", "redis.pcall('HMGET'", "redis.call('HMGET'"),
    "anybody renews": Mutant("lock/renew", NOT_OURS, "if not holder then"),
    "renewing does not renew": Mutant("lock/renew", "redis.call('PEXPIRE', NAME, ttl)"),
    # release
    "a release leaves the record": Mutant("lock/release", "redis.call('DEL', record)\n    elseif", "\n    elseif"),
    "a release by another deletes": Mutant("lock/release", "holder and holder ~= ARGV[1] then", "false then"),
    "an older record of an identity goes": Mutant("lock/release", "(adopted or writer == '*')", "true"),
    "who never adopted it deletes": Mutant("lock/release", "writer ~= '' and string.find", "string.find"),
    "nobody may release for an identity": Mutant("lock/release", "(adopted or writer == '*')", "adopted"),
    "a release for an identity is broken off": Mutant("lock/release", "(writer == '*' or string", "(string"),
    "a release by an earlier lease is clean": Mutant(
        "lock/release", "(writer == '*' or string.match(writers, '%S*$') == writer)", "true"
    ),
    "what was put back has a writer": Mutant("lock/release", "'writers', '', "),
    "undo steps go": Mutant("lock/release", "if not undo and done then", "if done then"),
    "broken off is done": Mutant("lock/release", "local done = ARGV[5] ~= '1' and", "local done ="),
    "what was found is not put back": Mutant("lock/release", "elseif token then", "elseif false then"),
    "what was found is put back in part": Mutant("lock/release", "'at', at, "),
    "what was put back is soon gone": Mutant("lock/release", "redis.call('PEXPIRE', record, 604800000)"),
    "progress goes": Mutant("lock/release", "(found[4] or '') == '' then", "true then"),
    "an empty record stays": Mutant("lock/release", "elseif not undo and (found[4] or '') == ''", "elseif false"),
    "a foreign record keeps the lock": Mutant("lock/release", "redis.pcall('HMGET'", "redis.call('HMGET'"),
    "a robust release wakes nobody": Mutant("lock/release", "local next = settle('', first)", "local next = FREE"),
    # gate
    "a gate for all": Mutant("fence_gate/accept", "if highest > fence then", "if false then"),
    "a gate for new ones only": Mutant("fence_gate/accept", "highest > fence", "highest >= fence"),
    "fences as numbers": Mutant("fence_gate/accept", "highest > fence", "(tonumber(highest) or 0) > tonumber(fence)"),
    "looking passes": Mutant("fence_gate/accept", "highest > fence", "fence ~= '' and highest > fence"),
    "a gate has no ttl": Mutant("fence_gate/accept", "'SET', KEYS[1], fence, 'PX', ARGV[2]", "'SET', KEYS[1], fence"),
    "a pass does not keep the gate": Mutant(
        "fence_gate/accept", "redis.call('PEXPIRE', KEYS[1], ARGV[2]) else", "else"
    ),
    "a refusal keeps the gate": Mutant(
        "fence_gate/accept", "fence then return", "fence then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return"
    ),
    "any text is a fence": Mutant("fence_gate/accept", " and string.match(highest, '^%d+$')"),
    "any number is a fence": Mutant("fence_gate/accept", "#highest == 16 and "),
}  # fmt: skip


def mutate(mutant: Mutant) -> Callable[[str], Script]:
    def loaded(name: str) -> Script:
        return mutated(name, mutant.old, mutant.new) if name == mutant.script else load(name)

    return loaded


def checks() -> list[Callable[[Redis], Awaitable[None]]]:
    """All tests of the scripts, with all their parameters."""
    found: list[Callable[[Redis], Awaitable[None]]] = []
    for name, test in vars(suite).items():
        if not name.startswith("test_") or not inspect.iscoroutinefunction(test):
            continue
        marks: list[Any] = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        if not marks:
            found.append(test)
            continue
        [mark] = marks
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        for values in mark.args[1]:
            found.append(partial(test, **dict(zip(names, values if len(names) > 1 else [values], strict=True))))
    return found


CHECKS = checks()


async def noticed(redis: Redis) -> str | None:
    """Run the checks until one fails; say what happened."""
    for check in CHECKS:
        await redis.flushall()
        try:
            await check(redis)
        # Whatever a broken script does to a check. Failed is what pytest.raises raises.
        except (AssertionError, TypeError, ValueError, AttributeError, RedisError, pytest.fail.Exception) as error:
            return f"{check}: {error}"
    return None


async def test_the_scripts_pass_every_check(redis: Redis) -> None:
    assert await noticed(redis) is None
    assert len(CHECKS) >= 30


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_every_mutant_is_caught(redis: Redis, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    loader = mutate(mutant)
    await redis.script_load(loader(mutant.script).source.decode())  # raises if it is no Lua any more
    monkeypatch.setattr(suite, "load", loader)
    assert await noticed(redis), "no check notices"
