"""The script that reads and changes the mark of a job, and the same decision under WATCH. Each call runs twice."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.executions import blocking_server as blocking_server
from ..support.executions import client as client
from ..support.executions import conduct
from ..support.inside import Argument, Call, converse, load, lock_keys, mark_keys

KEYS = mark_keys(lock_keys(b"m"))
NAME, MARK = KEYS.all
TTL = 30_000
GONE, HELD, TAKEN = 0, 1, 2


def run(client: Any, by: str, *words: Argument) -> Any:
    if by == "script":
        return client.eval(load("lock/mark").source.decode(), 2, *KEYS.all, *words)
    return conduct(client, converse(Call(0.0, 0.0, lambda _: None).of(KEYS, load("lock/mark"), words)))


both = pytest.mark.parametrize("by", ["script", "watch"])


@both
def test_a_mark_is_changed_by_the_holder_alone(client: Any, by: str) -> None:
    assert run(client, by, b"a", b"new", TTL) == [GONE, None]
    client.set(NAME, "b")
    assert run(client, by, b"a", b"new", TTL) == run(client, by, b"a") == [TAKEN, None]
    assert client.get(MARK) is None
    client.set(MARK, "old")
    assert run(client, by, b"a", b"new", TTL, b"old") == [TAKEN, b"old"]
    assert run(client, by, b"") == [HELD, b"old"]  # everybody may read
    client.set(NAME, "a")
    assert run(client, by, b"a") == [HELD, b"old"]
    assert client.get(MARK) == b"old"


@both
def test_a_late_copy_does_not_replace_a_later_text(client: Any, by: str) -> None:
    client.set(NAME, "a")
    begin, result, forget = (b"begun", TTL, b""), (b"result", TTL), (b"forgotten", TTL, b"begun")
    assert run(client, by, b"a", *begin) == [HELD, None]
    assert run(client, by, b"a", *begin) == [HELD, b"begun"]
    assert run(client, by, b"a", *result) == [HELD, b"begun"]
    for late in (begin, forget, result):
        assert run(client, by, b"a", *late) == [HELD, b"result"]
    assert client.get(MARK) == b"result"
    assert 0 < client.pttl(MARK) <= TTL
    client.set(MARK, "begun")
    for change in (forget, forget, begin):
        run(client, by, b"a", *change)
    assert client.get(MARK) == b"forgotten"


@both
@pytest.mark.parametrize("key", KEYS.all)
def test_a_key_of_another_type_is_not_touched(client: Any, by: str, key: bytes) -> None:
    client.set(NAME, "a")
    client.delete(key)
    client.lpush(key, "a list")
    with pytest.raises(Exception, match="WRONGTYPE"):
        run(client, by, b"a", b"new", TTL)
    assert client.lrange(key, 0, -1) == [b"a list"]


def test_a_result_is_written_when_the_server_is_out_of_memory(client: Any) -> None:
    """The work is done, and must not be forgotten. (Under WATCH the server refuses it.)"""
    client.set(NAME, "a")
    client.config_set("maxmemory", 1)
    try:
        assert run(client, "script", b"a", b"result", TTL) == [HELD, None]
    finally:
        client.config_set("maxmemory", 0)
    assert client.get(MARK) == b"result"
