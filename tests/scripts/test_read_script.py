"""The script that reads several facts at one moment, and the same under WATCH. Each call runs twice."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from ..support.executions import blocking_server as blocking_server
from ..support.executions import client as client
from ..support.executions import conduct
from ..support.inside import CONFLICT, Call, ReplyError, Words, converse, load, lock_keys, pack

KEYS = lock_keys(b"r\r\n$3\r\nx\x00\xff")
NAME, QUEUE, FENCE, POLLS = KEYS.all
COMMANDS: tuple[Words, ...] = (
    (b"GET", NAME),
    (b"GET", FENCE),
    (b"ZRANGE", QUEUE, 0, -1, b"WITHSCORES"),
    (b"HGET", NAME, b"fence"),
    (b"HMGET", POLLS, b"", b"there", b"not"),
    (b"PUBSUB", b"NUMSUB", b"rsa:x"),
)


def call(*commands: Words) -> Call:
    return Call(0.0, 0.0, lambda _: None).of(KEYS, load("link/read"), (b"".join(map(pack, commands)),))


def run(client: Any, by: str, *commands: Words) -> Any:
    asked = call(*commands)
    if by == "watch":
        return conduct(client, converse(asked))
    return client.eval(asked.script.source.decode(), len(KEYS.all), *KEYS.all, *asked.arguments)


@pytest.mark.parametrize("by", ["script", "watch"])
def test_each_command_has_its_reply(client: Any, by: str) -> None:
    """In their order, behind the time: any bytes, what is missing, and an error, which ends none of the others."""
    client.set(NAME, b"\r\n*9\r\n")
    client.zadd(QUEUE, {b"a": 1, b"b": 2})
    client.hset(POLLS, b"there", b"yes")
    for _ in range(2):
        time, held, fence, queue, wrong, fields, heard = run(client, by, *COMMANDS)
        assert int(time[0]) > 1_700_000_000
        assert (held, fence, fields) == (b"\r\n*9\r\n", None, [None, b"yes", None])
        assert queue in ([b"a", b"1", b"b", b"2"], [[b"a", 1.0], [b"b", 2.0]])
        assert "WRONGTYPE" in str(wrong)
        assert heard in ([b"rsa:x", 0], {b"rsa:x": 0})
    assert len(run(client, by)) == 1, "the time alone"


def test_what_changes_meanwhile_is_read_again(client: Any) -> None:
    """Under WATCH: replies of two moments are not told as those of one."""

    def change(words: Words) -> None:
        if words == (b"MULTI",):
            client.set(NAME, "other")

    assert conduct(client, converse(call((b"GET", NAME))), meanwhile=change) is CONFLICT


def test_keys_that_cannot_be_watched_are_an_error(client: Any) -> None:
    client.execute_command("ACL", "SETUSER", "blind", "on", "nopass", "~*", "+@all", "-watch")
    path = client.connection_pool.connection_kwargs["path"]
    with (
        redis.Redis(unix_socket_path=path, username="blind", password="any") as blind,
        pytest.raises(ReplyError, match="NOPERM"),
    ):
        conduct(blind, converse(call((b"GET", NAME))))
