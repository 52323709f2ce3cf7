"""What renews and releases with fewer keys while a hash slot is being moved: as the whole script, as far as it can.

The script, the talk that decides the same, and the script with all keys are run on equal data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from redis.exceptions import TryAgainError

from redis_sync_aio.embedded import EmbeddedServer

from ..support.executions import conduct
from ..support.inside import (
    WRITER_WEIGHT,
    Argument,
    Call,
    Keys,
    ReplyError,
    Script,
    converse,
    load,
    lock_keys,
    permit_keys,
    robust_keys,
)

LOCK, ROBUST = lock_keys(b"n"), robust_keys(b"n")
SEM, RW = permit_keys(b"n", "sem"), permit_keys(b"n", "rw")
TTL = 30_000
WRITER = b"w1"


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        yield client


def run(client: Any, script: Script, keys: Keys, *arguments: Argument) -> Any:
    return client.eval(script.source.decode(), len(keys.all), *keys.all, *arguments)


def narrowed(script: str, keys: Keys) -> tuple[Script, Keys]:
    found = load(script).narrow
    assert found is not None
    return found.script, replace(keys, all=tuple(keys.all[number] for number in found.keys), heads={})


def prepare(client: Any, keys: Keys) -> None:
    """Let "a" hold it, as the writer if it is a read/write lock."""
    client.flushall()
    if keys in (LOCK, ROBUST):
        fence = run(client, load("lock/acquire"), LOCK, b"a", TTL, b"", 0)
        if keys is ROBUST:
            assert run(client, load("robust/adopt"), keys, b"a", fence, TTL, WRITER, b"0")[0] == 1
        return
    weight, limit = (WRITER_WEIGHT, WRITER_WEIGHT) if keys is RW else (2, 5)
    run(client, load("permits/acquire"), keys, b"a", TTL, b"", 0, weight, limit)
    if keys is not RW:
        run(client, load("permits/acquire"), keys, b"other", TTL, b"", 0, 1, 5)


CASES: list[tuple[str, Keys, tuple[Argument, ...]]] = [
    ("lock/renew", LOCK, (b"a", 2 * TTL)),
    ("lock/renew", LOCK, (b"b", 2 * TTL)),
    ("robust/renew", ROBUST, (b"a", 2 * TTL)),
    ("lock/release", LOCK, (b"a", b"", b"0")),
    ("lock/release", LOCK, (b"a", b"", b"0", 50)),
    ("lock/release", LOCK, (b"b", b"", b"0")),
    ("robust/release", ROBUST, (b"a", b"", b"0", WRITER, b"0")),
    ("robust/release", ROBUST, (b"a", b"", b"0", b"*", b"1")),
    ("permits/renew", SEM, (b"a", 2 * TTL, 2)),
    ("permits/renew", SEM, (b"a", 2 * TTL, 3)),
    ("permits/renew", SEM, (b"b", 2 * TTL, 1)),
    ("permits/renew", RW, (b"a", 2 * TTL, WRITER_WEIGHT)),
    ("permits/release", SEM, (b"a", b"", b"0")),
    ("permits/release", SEM, (b"b", b"", b"0")),
    ("permits/release", RW, (b"a", b"", b"0")),
    ("permits/downgrade", RW, (b"a",)),
    ("permits/downgrade", RW, (b"b",)),
]


def left(client: Any, keys: Keys) -> dict[bytes, Any]:
    """Return what holds, and for about how long; not what only remembers fences."""
    found: dict[bytes, Any] = {}
    for key in keys.all:
        kind = client.type(key)
        if kind == b"string" and key == keys.name:
            found[key] = client.get(key), round(client.pttl(key) / TTL)
        elif kind == b"hash":
            values = client.hgetall(key)
            found[key] = {name: value for name, value in values.items() if name not in (b"kept", b"fence", b"at")}
        elif kind == b"zset":
            now = client.time()[0]
            members = client.zrange(key, 0, -1, withscores=True)
            found[key] = {member: round((until / 1e6 - now) * 1000 / TTL) for member, until in members}
    for values in found.values():  # fences differ from run to run
        for name, value in values.items() if isinstance(values, dict) else ():
            if name.startswith(b"="):
                values[name] = value.split(b" ")[0]
    return found


def outcome(reply: Any) -> int:
    return int(reply[0]) if isinstance(reply, (list, tuple)) else int(reply)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_p4_as_the_whole_script_and_twice(client: Any, case: tuple[str, Keys, tuple[Argument, ...]]) -> None:
    script, keys, arguments = case
    prepare(client, keys)
    expected, after = outcome(run(client, load(script), keys, *arguments)), left(client, keys)
    narrow, fewer = narrowed(script, keys)
    prepare(client, keys)
    assert outcome(run(client, narrow, fewer, *arguments)) == expected
    assert left(client, keys) == after
    again = outcome(run(client, narrow, fewer, *arguments))
    assert left(client, keys) == after
    assert again == (expected if "release" not in script or script == "permits/downgrade" else again)
    if keys in (LOCK, SEM):
        prepare(client, keys)
        call = Call(fewer, narrow, arguments, 0.0, 0.0, lambda _: None)
        assert outcome(conduct(client, converse(call))) == expected
        assert left(client, keys) == after


@pytest.mark.parametrize("script", ["lock/renew", "permits/renew"])
def test_p8_no_fences_are_reserved(client: Any, script: str) -> None:
    """They could not be remembered: a process that shares uses up those that it has."""
    keys, size = (LOCK, ()) if script == "lock/renew" else (SEM, (1,))
    prepare(client, keys)
    narrow, fewer = narrowed(script, keys)
    arguments = (b"a", TTL, *size, 128)
    assert run(client, narrow, fewer, *arguments)[2:] == [0, 0]
    assert conduct(client, converse(Call(fewer, narrow, arguments, 0.0, 0.0, lambda _: None)))[2:] == (0, 0)


@pytest.mark.parametrize("arguments", [(b"a", b"rsa:x|1|9|a", b"0"), (b"a", b"", b"1")], ids=["ticket", "pending"])
@pytest.mark.parametrize("script", ["lock/release", "robust/release", "permits/release"])
def test_p5_what_has_to_be_written_elsewhere_waits(client: Any, script: str, arguments: tuple[Argument, ...]) -> None:
    keys = {"lock/release": LOCK, "robust/release": ROBUST, "permits/release": SEM}[script]
    prepare(client, keys)
    before = left(client, keys)
    narrow, fewer = narrowed(script, keys)
    with pytest.raises(TryAgainError):
        run(client, narrow, fewer, *arguments)
    if keys is not ROBUST:
        with pytest.raises(ReplyError, match=r"^TRYAGAIN"):
            conduct(client, converse(Call(fewer, narrow, arguments, 0.0, 0.0, lambda _: None)))
    assert left(client, keys) == before


def test_a_robust_lock_whose_record_was_not_adopted_is_released_by_its_name(client: Any) -> None:
    """But not one that was: its work would look interrupted to the next holder."""
    prepare(client, LOCK)
    name_and_record, _ = narrowed("robust/release", ROBUST)
    assert name_and_record.narrow is not None
    script, keys = name_and_record.narrow.script, replace(LOCK, all=LOCK.all[:1], heads={})
    with pytest.raises(TryAgainError):
        run(client, script, keys, b"a", b"", b"0", WRITER, b"0")
    assert client.exists(LOCK.name)
    assert run(client, script, keys, b"a", b"", b"0", b"", b"0") == 1
