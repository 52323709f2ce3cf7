"""The proxy lets through what it should, and tells commands apart."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from redis_sync_aio.testing._resp import Splitter
from redis_sync_aio.testing.faults import Action, FaultProxy, anything, arg, script
from tests.support.tls import make_tls

from .conftest import Wire

pytestmark = pytest.mark.real


async def test_its_end_does_not_wait_for_a_handshake(upstream: str, tmp_path: Path) -> None:
    """A client began to speak TLS and says nothing more. From Python 3.12 on that took a minute."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    async with asyncio.timeout(30):
        async with FaultProxy(upstream, make_tls(tmp_path).context) as proxy:
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(outgoing.read())
            assert await reader.read(1)  # the server has answered, and waits for the client
        with suppress(OSError):  # it may be closed
            writer.write_eof()
            await reader.read()
        writer.close()


def test_it_works_in_a_loop_of_uvloop(upstream: str) -> None:
    """Its transports are no asyncio.Transport."""

    async def use() -> None:
        async with FaultProxy(upstream) as proxy, proxy.client() as client:
            proxy.fragment = 3
            assert await client.ping()
            cut = proxy.on("ECHO", Action.CUT_AFTER)
            assert await client.echo("again") == b"again"  # redis-py has sent it twice
            assert (cut.acted, proxy.commands["ECHO"]) == (1, 2)
            await proxy.cut()
            assert proxy.live == 0

    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())


class TestPassing:
    @pytest.mark.parametrize("protocol", [2, 3])
    @pytest.mark.parametrize("fragment", [0, 1, 7])
    async def test_a_client_sees_no_difference(self, proxy: FaultProxy, protocol: int, fragment: int) -> None:
        proxy.fragment = fragment
        binary = bytes(range(256)) * 2
        async with Redis.from_url(proxy.url, protocol=protocol) as client:
            lua = "return {KEYS[1], ARGV[1], 7, false, {err = 'MINE'}}"
            sha = await client.script_load(lua)
            reply: Any = await client.evalsha(sha, 1, "k", binary)
            assert [*reply[:4], str(reply[4])] == [b"k", binary, 7, None, "MINE"]
            async with client.pipeline(transaction=True) as pipe:
                for args in (["SET", "k", binary], ["GET", "k"], ["INCR", "k"], ["CONFIG", "GET", "port"]):
                    pipe.execute_command(*args)
                replies = await pipe.execute(raise_on_error=False)
            assert replies[1] == binary
            assert isinstance(replies[2], ResponseError)
            assert replies[3] == ({b"port": b"0"} if protocol == 3 else [b"port", b"0"])
            assert proxy.commands["EVALSHA"] == proxy.commands["MULTI"] == 1

    async def test_the_upstream_can_be_tcp(self, proxy: FaultProxy) -> None:
        async with FaultProxy((proxy.host, proxy.port)) as outer, Redis.from_url(outer.url) as client:
            assert await client.ping()
            assert (outer.commands["PING"], proxy.commands["PING"]) == (1, 1)
            assert (outer.connections, outer.live) == (1, 1)

    async def test_without_a_server_connections_are_closed(self) -> None:
        async with FaultProxy("/nowhere") as proxy:
            wire = Wire(*await asyncio.open_connection(proxy.host, proxy.port))
            assert await wire.rest() == b""
            await wire.close()
            assert (proxy.connections, proxy.live) == (1, 0)

    async def test_what_either_side_sent_before_it_closed_arrives(
        self, proxy: FaultProxy, wire: Wire, direct: Redis
    ) -> None:
        wire.send("SET", "k", "v")
        wire.send("QUIT")
        assert await wire.rest() == b"+OK\r\n+OK\r\n"
        await proxy.until(lambda: proxy.live == 0)
        assert await direct.get("k") == "v"

    async def test_a_mistake_in_a_test_is_not_hidden(self, upstream: str) -> None:
        async def mistaken() -> None:
            async with FaultProxy(upstream) as proxy:
                proxy.on(lambda args: bool(args[99]), Action.DROP)
                wire = Wire(*await asyncio.open_connection(proxy.host, proxy.port))
                wire.send("PING")
                assert await wire.rest() == b""
                await wire.close()

        with pytest.raises(IndexError):
            await mistaken()


class TestMatching:
    def test_by_argument(self) -> None:
        assert arg(b"lock:")([b"GET", b"a-lock:1"])
        assert not arg("lock:")([b"GET", b"other"])

    def test_by_script(self) -> None:
        text = b"return 1"
        sha = hashlib.sha1(text).hexdigest()
        assert script(sha)([b"EVALSHA", sha.upper().encode(), b"0"])
        assert script(sha)([b"eval", text, b"0"])
        assert not script(sha)([b"EVAL", b"return 2", b"0"])
        assert not script(sha)([b"GET", sha.encode()])

    async def test_times_skip_and_cancel(self, proxy: FaultProxy, wire: Wire) -> None:
        rule = proxy.on("ping", Action.answer_error("ERR mine"), times=2, skip=1)
        replies = [await wire.call("PING") for _ in range(4)]
        assert replies == [b"+PONG\r\n", b"-ERR mine\r\n", b"-ERR mine\r\n", b"+PONG\r\n"]
        assert (rule.hits, rule.acted, proxy.commands["PING"]) == (4, 2, 2)
        endless = proxy.on("PING", Action.answer_error("ERR more"), times=None)
        assert {await wire.call("PING") for _ in range(5)} == {b"-ERR more\r\n"}
        endless.cancel()
        assert await wire.call("PING") == b"+PONG\r\n"

    async def test_the_first_rule_that_is_due_acts(self, proxy: FaultProxy, wire: Wire) -> None:
        first, second = proxy.on(anything, Action.answer_error("ERR 1")), proxy.on("PING", Action.answer_error("ERR 2"))
        assert [await wire.call("PING") for _ in range(3)] == [b"-ERR 1\r\n", b"-ERR 2\r\n", b"+PONG\r\n"]
        assert (first.hits, second.hits) == (3, 2)


class TestSubscriptions:
    async def test_the_confirmation_is_the_reply(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on("SUBSCRIBE", Action.HOLD_REPLY)
        subscriber.send("SUBSCRIBE", "a", "b")
        await rule.fired.wait()
        assert await direct.publish("b", "x") == 1
        assert await subscriber.is_silent()
        rule.release.set()
        frames = [await subscriber.receive() for _ in range(3)]
        kinds = [Splitter().feed(frame)[0].items[0] for frame in frames]
        assert kinds == [b"subscribe", b"subscribe", b"message"]

    async def test_a_push_is_no_reply(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        held = proxy.on("PING", Action.HOLD)
        subscriber.send("PING")
        await held.fired.wait()
        await direct.publish("news", "x")
        assert b"message" in await subscriber.receive()
        rule = proxy.on("PING", Action.CUT_AFTER)
        held.release.set()
        assert b"PONG" in (await subscriber.receive()).upper()
        assert not rule.fired.is_set()

    async def test_drop(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on_push(b"lost", Action.DROP)
        await direct.publish("news", "lost")
        await direct.publish("news", "found")
        assert b"found" in await subscriber.receive()
        assert rule.fired.is_set()
        assert rule.hits == 1

    async def test_hold(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on_push("x", Action.HOLD)
        await direct.publish("news", "x")
        await rule.fired.wait()
        assert await subscriber.is_silent()
        rule.release.set()
        assert b"message" in await subscriber.receive()
