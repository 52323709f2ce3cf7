"""Both ways to execute a decision on a server, with a clock of the test's own: a script, or a dialogue under WATCH."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import redis
import redis.exceptions

from redis_sync_aio.embedded import EmbeddedServer

from .inside import CONFLICT, Argument, Call, Dialogue, Keys, Reply, ReplyError, Script, Words, converse, load

SECOND = 1_000_000

Execution: TypeAlias = Callable[[Any, str, Keys, tuple[Argument, ...], int], Reply]
"""``execute(client, script, keys, arguments, now)``; now: microseconds."""


@pytest.fixture(scope="module")
def blocking_server() -> Iterator[Any]:
    """A client of a server of the module's own."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def client(blocking_server: Any) -> Any:
    """The same, of an empty server."""
    blocking_server.flushall()
    return blocking_server


def clocked(script: Script) -> str:
    """Return a script with the last two arguments for the server's clock."""
    source = script.source.decode()
    assert "redis.call('TIME')" in source, "the clock is read in another way"
    time = "local micros = table.remove(ARGV)\nlocal TIME = {table.remove(ARGV), micros}\n"
    return time + source.replace("redis.call('TIME')", "TIME")


def by_script(client: Any, script: str, keys: Keys, arguments: tuple[Argument, ...], now: int) -> Reply:
    """Execute a script."""
    return client.eval(clocked(load(script)), len(keys.all), *keys.all, *arguments, *divmod(now, SECOND))


def by_watch(client: Any, script: str, keys: Keys, arguments: tuple[Argument, ...], now: int) -> Reply:
    """Execute a dialogue; nobody else changes anything meanwhile, so there is no conflict."""
    words = tuple(b"%d" % word if isinstance(word, int) else word for word in arguments)
    reply = conduct(client, converse(Call(0.0, 0.0, lambda _: None).of(keys, load(script), words)), now)
    assert reply is not CONFLICT
    return reply


def conduct(client: Any, said: Dialogue, now: int | None = None, meanwhile: Callable[[Words], object] = id) -> Reply:
    """Carry a dialogue on one connection of ``client``; ``meanwhile`` is called with each command before it is sent."""
    connection = client.connection_pool.get_connection()
    try:
        replies: Any = None
        while True:
            batch = said.send(replies)
            replies = []
            for words in batch:
                meanwhile(words)
                connection.send_command(*words)
                reply = _read(connection)
                replies.append(reply if now is None or words != (b"TIME",) else divmod(now, SECOND))
    except StopIteration as end:
        return end.value
    except ReplyError:
        connection.disconnect()  # as it is watching
        raise
    finally:
        client.connection_pool.release(connection)


def _read(connection: Any) -> Reply:
    try:
        return connection.read_response(disable_decoding=True)
    except redis.exceptions.NoPermissionError as error:
        return ReplyError(f"NOPERM {error}")
    except redis.exceptions.OutOfMemoryError as error:
        return ReplyError(f"OOM {error}")
    except redis.exceptions.ResponseError as error:
        return ReplyError(str(error))
