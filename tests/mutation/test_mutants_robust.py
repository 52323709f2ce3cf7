"""Mutants of the scripts of robust locks and of the gate: their script tests have to notice every one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from redis.asyncio import Redis

from ..scripts import test_robust_scripts as suite
from ..support.script_mutants import Mutant, checks, failing, is_caught

pytestmark = pytest.mark.real


def of(script: str, old: str, new: str = "") -> Mutant:
    """In one script replace ``old`` by ``new``."""
    return Mutant(old, new, script)


NOT_OURS = "if holder ~= ARGV[1] then"
OUTDATED = "if last and string.sub(last, 18) == token and string.sub(last, 1, 16) ~= fence then return {2, now} end"
WRONG = "if found[1] and not sound or not found[1] and redis.call('PTTL', RECORD) ~= -2 then"
KEEP = "redis.call('PEXPIRE', RECORD, record_ttl(ARGV[%d]))"
MUTANTS: Mapping[str, Mutant] = {
    # adopt
    "anybody adopts": of("robust/adopt", NOT_OURS, "if not holder then"),
    "adopts what is gone": of("robust/adopt", NOT_OURS, "if holder and holder ~= ARGV[1] then"),
    "a late copy of an identity adopts": of("robust/adopt", OUTDATED),
    "a replay takes itself for abandoned": of("robust/adopt", "found[2] == fence\n", "false\n"),
    "an identity is not told of its own crash": of(
        "robust/adopt", "found[1] == token and found[2] == fence\n", "found[1] == token\n"
    ),
    "a later adoption keeps the writer": of(
        "robust/adopt", "writers == '' and writer or writers .. ' ' .. writer", "writers"
    ),
    "an earlier adoption is repeated": of("robust/adopt", "if known and latest ~= writer then return {3, now} end"),
    "an earlier lease adopts as if it were new": of(
        "robust/adopt", "' ' .. writer .. ' ', 1, true)", "' ' .. writer .. ' $', 1, false)"
    ),
    "each adoption of an identity counts from the beginning": of(
        "robust/adopt", "tonumber(seq), found[7]", "0, found[7]"
    ),
    "the list of writers grows": of("robust/adopt", "if #writers + #writer >= 832 then", "if false then"),
    "the list of writers is short": of("robust/adopt", ">= 832", ">= 99"),
    "a withdrawn adoption stays": of(
        "robust/adopt", "redis.call('HSET', RECORD, 'writers', writer .. ' ' .. others)"
    ),
    "a withdrawn adoption is forgotten": of("robust/adopt", "writer .. ' ' .. others)", "others)"),
    "the only adoption is withdrawn": of("robust/adopt", "'^(.+) %S+$')", "'^(.+) %S+$') or ''"),
    "a withdrawal adopts": of("robust/adopt", "if ARGV[5] == '1' then", "if false then"),
    "any record is adopted": of("robust/adopt", WRONG, "if false then"),
    "any fence is ours": of("robust/adopt", "number(found[2], 16, 16) and "),
    "any time is ours": of("robust/adopt", "number(found[3], 16, 16) and "),
    "any number is ours": of("robust/adopt", " and number(found[6], 1, 15)"),
    "numbers may be long": of("robust/adopt", "#text <= most and"),
    "numbers may be short": of("robust/adopt", "#text >= least and"),
    "numbers may be text": of("robust/adopt", "string.match(text, '^%d+$')", "true"),
    "a replay finds nobody": of("robust/adopt", "seq = ARGV[4], found[4] or ''", "seq = ARGV[4], ''"),
    "the predecessor is not told": of("robust/adopt", "found[1] and found[2] .. ' '", "false and found[2] .. ' '"),
    "the predecessor's own predecessor is told": of(
        "robust/adopt",
        "before = found[1] and found[2] .. ' ' .. found[3] .. ' ' .. found[1]",
        "before = before",
    ),
    "the predecessor is not remembered": of("robust/adopt", "'before', before,", "'before', '',"),
    "the fence is not written": of("robust/adopt", "'fence', fence, ", ""),
    "adopting keeps the older number": of("robust/adopt", "seq = '0'", "seq = seq"),
    "adopting forgets the progress": of("robust/adopt", "'seq', seq)", "'seq', seq, 'progress', '')"),
    "an identity that joins forgets the progress": of(
        "robust/adopt", "writers .. ' ' .. writer)", "writers .. ' ' .. writer, 'progress', '')"
    ),
    "the time of the record stands still": of("robust/adopt", "'at', at, ", "'at', found[3] or at, "),
    "a new record has no ttl": of("robust/adopt", "  end\n  " + KEEP % 3, "  end"),
    "a record lasts as long as the lease": of("robust/adopt", "604800000 + remember(ms)", "remember(ms)"),
    "a record lasts a week whatever the ttl": of("robust/adopt", "604800000 + remember(ms)", "604800001"),
    # record
    "anybody records": of("robust/record", NOT_OURS, "if not holder then"),
    "records what is gone": of("robust/record", NOT_OURS, "if holder and holder ~= ARGV[1] then"),
    "who finds it gone wakes nobody": of("robust/record", "settle('', heads())\n  return {0", "return {0"),
    "a late copy of an identity records": of("robust/record", OUTDATED),
    "a late copy overwrites": of("robust/record", "tonumber(found[6]) > tonumber(ARGV[5])", "false"),
    "numbers as text": of("robust/record", "tonumber(found[6]) > tonumber(ARGV[5])", "found[6] > ARGV[5]"),
    "an earlier lease of the identity records": of("robust/record", "then return {3, now} end", "then end"),
    "nobody records when the record was evicted": of("robust/record", "writers ~= '' and ", ""),
    "a lease that records when it was evicted is not the writer": of(
        "robust/record", "writers == '' and ARGV[8] or writers", "writers"
    ),
    "what is refused renews": of(
        "robust/record", "local same = found", "redis.call('PEXPIRE', NAME, ARGV[3]) local same = found"
    ),
    "any record is written": of("robust/record", WRONG, "if false then"),
    "nothing is recorded": of("robust/record", "'progress', ARGV[6], "),
    "no steps are recorded": of("robust/record", ", 'undo', ARGV[7]"),
    "the number is not recorded": of("robust/record", "'seq', ARGV[5], "),
    "the predecessor stays": of("robust/record", "'before', '',"),
    "recording always renews": of("robust/record", "if ttl ~= '0' then", "do"),
    "recording never renews": of("robust/record", "if ttl ~= '0' then", "if false then"),
    "recording forgets the fence": of("robust/record", "redis.call('PEXPIRE', FENCE, keep)"),
    "recording does not keep the record": of("robust/record", KEEP % 4),
    "a foreign key is found too late": of(
        "robust/record",
        "local found = redis",
        "redis.call('PEXPIRE', NAME, ARGV[4]) local found = redis",
    ),
    # renew
    "renewing does not keep the record": of(
        "lock/renew", "redis.call('PEXPIRE', record, 604800000 + remember(ttl))"
    ),
    "renewing keeps any record": of("lock/renew", "redis.pcall('HMGET', record, 'token')[1] == holder", "true"),
    "renewing stops at a foreign record": of("lock/renew", "redis.pcall('HMGET'", "redis.call('HMGET'"),
    "anybody renews": of("lock/renew", NOT_OURS, "if not holder then"),
    "renewing does not renew": of("lock/renew", "redis.call('PEXPIRE', NAME, ttl)"),
    # release
    "a release leaves the record": of("lock/release", "redis.call('DEL', record)\n    elseif", "\n    elseif"),
    "a release by another deletes": of("lock/release", "holder and holder ~= ARGV[1] then", "false then"),
    "an older record of an identity goes": of("lock/release", "(adopted or writer == '*')", "true"),
    "who never adopted it deletes": of("lock/release", "writer ~= '' and string.find", "string.find"),
    "nobody may release for an identity": of("lock/release", "(adopted or writer == '*')", "adopted"),
    "a release for an identity is broken off": of("lock/release", "(writer == '*' or string", "(string"),
    "a release by an earlier lease is clean": of(
        "lock/release", "(writer == '*' or string.match(writers, '%S*$') == writer)", "true"
    ),
    "what was put back has a writer": of("lock/release", "'writers', '', "),
    "undo steps go": of("lock/release", "if not undo and done then", "if done then"),
    "broken off is done": of("lock/release", "local done = ARGV[5] ~= '1' and", "local done ="),
    "what was found is not put back": of("lock/release", "elseif token then", "elseif false then"),
    "what was found is put back in part": of("lock/release", "'at', at, "),
    "what was put back is soon gone": of("lock/release", "redis.call('PEXPIRE', record, 604800000)"),
    "progress goes": of("lock/release", "(found[4] or '') == '' then", "true then"),
    "an empty record stays": of("lock/release", "elseif not undo and (found[4] or '') == ''", "elseif false"),
    "a foreign record keeps the lock": of("lock/release", "redis.pcall('HMGET'", "redis.call('HMGET'"),
    "a robust release wakes nobody": of("lock/release", "local next = settle('', first)", "local next = FREE"),
    # gate
    "a gate for all": of("fence_gate/accept", "if highest > fence then", "if false then"),
    "a gate for new ones only": of("fence_gate/accept", "highest > fence", "highest >= fence"),
    "fences as numbers": of("fence_gate/accept", "highest > fence", "(tonumber(highest) or 0) > tonumber(fence)"),
    "looking passes": of("fence_gate/accept", "highest > fence", "fence ~= '' and highest > fence"),
    "a gate has no ttl": of("fence_gate/accept", "'SET', KEYS[1], fence, 'PX', ARGV[2]", "'SET', KEYS[1], fence"),
    "a pass does not keep the gate": of(
        "fence_gate/accept", "redis.call('PEXPIRE', KEYS[1], ARGV[2]) else", "else"
    ),
    "a refusal keeps the gate": of(
        "fence_gate/accept", "fence then return", "fence then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return"
    ),
    "any text is a fence": of("fence_gate/accept", " and string.match(highest, '^%d+$')"),
    "any number is a fence": of("fence_gate/accept", "#highest == 16 and "),
}  # fmt: skip


CHECKS = checks(suite)


async def test_the_scripts_pass_every_check(redis: Redis) -> None:
    assert await failing(redis, CHECKS) is None
    assert len(CHECKS) >= 30


@pytest.mark.ci
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_every_mutant_is_caught(redis: Redis, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    await is_caught(redis, monkeypatch, mutant, [mutant.script], suite, CHECKS)
