"""The proxy does to a command what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing._resp import encode
from redis_sync_aio.testing.faults import Action, FaultProxy, Rule
from tests.support.body import FAST

from .conftest import Wire

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda proxy: proxy.on("GET", "cut"), "action must be an Action such as Action.CUT_AFTER"),
        (lambda proxy: proxy.on("GET", Action.delay_reply), "action must be an Action such as Action.CUT_AFTER"),
        (lambda proxy: proxy.on(5, Action.CUT_AFTER), "match must be str, bytes or a predicate"),
        (lambda proxy: proxy.on("GET", Action.CUT_AFTER, times="once"), "times must be a whole number"),
        (lambda proxy: proxy.on("GET", Action.CUT_AFTER, skip=-1), "skip must be 0 or more"),
        (lambda proxy: proxy.on_push("wake", None), "action must be an Action"),
        (lambda proxy: proxy.on_push(None, Action.HOLD), "match must be"),
        (lambda proxy: proxy.on_push("wake", Action.CUT_AFTER), "for replies, and a push has none"),
        (lambda _: Action.delay("long"), "seconds must be seconds"),  # type: ignore[arg-type]
        (lambda _: Action.delay_reply(-1), "seconds must be finite and not negative"),
        (lambda _: Action.answer_error(404), "text must be str or bytes"),  # type: ignore[arg-type]
        (lambda _: Action(request="cut"), "request must be a coroutine function of a Passage"),  # type: ignore[arg-type]
        (lambda _: FaultProxy(6379), "upstream must be an EmbeddedServer"),  # type: ignore[arg-type]
        (lambda _: FaultProxy(("127.0.0.1", "6379")), "upstream must be"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_given(wrong: Callable[[FaultProxy], object], said: str) -> None:
    """It would do nothing, or fail in the middle of a test."""
    with pytest.raises((TypeError, ValueError), match=said):
        wrong(FaultProxy(("127.0.0.1", 1)))


class TestActions:
    async def test_cut_before(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.CUT_BEFORE)
        wire.send("SET", "k", 0)
        wire.send("INCR", "k")
        wire.send("INCR", "k")
        await wire.rest()
        assert rule.fired.is_set()

        async def passed() -> bool:  # what came before: the server may read it later than the end of the connection
            return await direct.get("k") is not None

        await wait_until(passed, FAST, timeout=5)
        assert await direct.get("k") == "0"
        assert (rule.hits, proxy.commands["INCR"], proxy.live) == (1, 0, 0)

    async def test_cut_after(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("BLPOP", Action.CUT_AFTER)
        wire.send("BLPOP", "k", 0)
        assert await wire.is_silent()
        assert not rule.fired.is_set()
        await direct.lpush("k", "v")
        assert await wire.rest() == b""
        assert rule.fired.is_set()
        assert await direct.exists("k") == 0

    async def test_cut_inside_reply(self, proxy: FaultProxy, wire: Wire) -> None:
        await wire.call("SET", "k", "v" * 100)
        rule = proxy.on("GET", Action.CUT_INSIDE_REPLY)
        wire.send("GET", "k")
        wire.send("PING")
        reply = b"$100\r\n" + b"v" * 100 + b"\r\n"
        assert await wire.rest() == reply[:54]
        assert rule.fired.is_set()

    async def test_swallow_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.SWALLOW_REPLY)
        wire.send("INCR", "k")
        await rule.fired.wait()
        assert await direct.get("k") == "1"
        wire.send("INCR", "k")
        assert await wire.is_silent()
        assert await direct.get("k") == "2"
        assert proxy.live == 1
        await wire.close()
        await proxy.until(lambda: proxy.live == 0)

    async def test_swallow_request(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        await wire.call("SUBSCRIBE", "news")
        rule = proxy.on("PING", Action.SWALLOW_REQUEST)
        wire.send("PING")
        await rule.fired.wait()
        wire.send("UNSUBSCRIBE", "news")
        assert await wire.is_silent()
        assert await direct.publish("news", "x") == 1
        assert b"message" in await wire.receive()  # the other direction works
        assert (proxy.commands["UNSUBSCRIBE"], proxy.live) == (0, 1)

    async def test_delay_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.delay_reply(0.2))
        started = asyncio.get_running_loop().time()
        wire.send("INCR", "k")
        wire.send("PING")
        await rule.fired.wait()
        assert await direct.get("k") == "1"
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"+PONG\r\n"]
        assert asyncio.get_running_loop().time() - started >= 0.2

    async def test_delay_request(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.delay(0.2))
        started = asyncio.get_running_loop().time()
        wire.send("INCR", "k")
        wire.send("GET", "k")
        await rule.fired.wait()
        assert await direct.get("k") is None
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"$1\r\n1\r\n"]
        assert asyncio.get_running_loop().time() - started >= 0.2

    async def test_duplicate(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.DUPLICATE)
        wire.send("INCR", "k")
        wire.send("GET", "k")
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"$1\r\n2\r\n"]
        assert rule.fired.is_set()
        assert (rule.hits, proxy.commands["INCR"]) == (1, 2)

    async def test_error_comes_in_its_turn(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        before, rule = (
            proxy.on("PING", Action.HOLD_REPLY),
            proxy.on("INCR", Action.answer_error("READONLY You can't write")),
        )
        for args in (["PING"], ["INCR", "k"], ["INCR", "k"], ["PING"]):
            wire.send(*args)
        await before.fired.wait()
        assert await wire.is_silent()
        assert not rule.fired.is_set()
        before.release.set()
        replies = [await wire.receive() for _ in range(4)]
        assert replies == [b"+PONG\r\n", b"-READONLY You can't write\r\n", b":1\r\n", b"+PONG\r\n"]
        assert rule.fired.is_set()
        assert await direct.get("k") == "1"

    async def test_cut_after_reply(self, proxy: FaultProxy, wire: Wire) -> None:
        await wire.call("HELLO", 3)
        await wire.call("SUBSCRIBE", "news")
        rule = proxy.on("PUBLISH", Action.CUT_AFTER_REPLY, skip=1)
        assert await wire.call("PUBLISH", "news", "x") == b":1\r\n"
        assert b"message" in await wire.receive()
        wire.send("PUBLISH", "news", "y")
        assert await wire.rest() == b":1\r\n"
        assert rule.fired.is_set()

    async def test_hold(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.HOLD)
        wire.send("INCR", "k")
        wire.send("PING")
        await rule.fired.wait()
        assert await wire.is_silent()
        assert await direct.get("k") is None
        rule.release.set()
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"+PONG\r\n"]

    async def test_hold_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", Action.HOLD_REPLY)
        wire.send("INCR", "k")
        await rule.fired.wait()
        assert await direct.get("k") == "1"
        assert await wire.is_silent()
        rule.release.set()
        assert await wire.receive() == b":1\r\n"

    async def test_a_held_command_reaches_the_server_after_its_client_has_gone(
        self, proxy: FaultProxy, wire: Wire, direct: Redis
    ) -> None:
        rule = proxy.on("INCR", Action.HOLD)
        wire.send("INCR", "k")
        await rule.fired.wait()
        await wire.close()
        await direct.set("k", 41)
        rule.release.set()
        await proxy.until(lambda: proxy.live == 0)
        assert await direct.get("k") == "42"


class TestControls:
    async def test_refuse(self, proxy: FaultProxy, wire: Wire, wires: Callable[[], Any]) -> None:
        assert await wire.call("PING") == b"+PONG\r\n"
        proxy.refuse = True
        assert await (await wires()).rest() == b""
        assert await wire.call("PING") == b"+PONG\r\n"
        assert (proxy.connections, proxy.live) == (1, 1)
        proxy.refuse = False
        assert await (await wires()).call("PING") == b"+PONG\r\n"
        assert (proxy.connections, proxy.live) == (2, 2)

    async def test_cut(self, proxy: FaultProxy, wire: Wire, wires: Callable[[], Any], direct: Redis) -> None:
        other = await wires()
        held = proxy.on("INCR", Action.HOLD)
        wire.send("INCR", "k")
        await held.fired.wait()
        await other.call("PING")
        await proxy.cut()
        assert (await wire.rest(), await other.rest()) == (b"", b"")
        assert proxy.live == 0
        held.release.set()
        assert await (await wires()).call("GET", "k") == b"$-1\r\n"

    async def test_black_hole(self, proxy: FaultProxy, subscriber: Wire, wires: Callable[[], Any]) -> None:
        sender = await wires()
        await sender.call("PING")
        proxy.black_hole = True
        sender.send("PUBLISH", "news", "x")
        assert await sender.is_silent()
        assert proxy.commands["PUBLISH"] == 0
        assert proxy.live == 2
        proxy.black_hole = False
        assert await sender.receive() == b":1\r\n"
        assert b"message" in await subscriber.receive()

    async def test_the_end_of_a_connection_does_not_pass_a_black_hole(
        self, proxy: FaultProxy, wire: Wire, direct: Redis
    ) -> None:
        name = await wire.call("CLIENT", "ID")
        proxy.black_hole = True
        await direct.client_kill_filter(_id=name[1:-2].decode())
        assert await wire.is_silent()
        proxy.black_hole = False
        assert await wire.rest() == b""

    async def test_latency_is_not_paid_by_each_of_many(self, proxy: FaultProxy, wire: Wire) -> None:
        proxy.latency = 0.1
        started = asyncio.get_running_loop().time()
        for _ in range(20):
            wire.send("PING")
        assert [await wire.receive() for _ in range(20)] == [b"+PONG\r\n"] * 20
        assert 0.2 <= asyncio.get_running_loop().time() - started < 2.0

    async def test_fragment(self, proxy: FaultProxy) -> None:
        class Pieces(asyncio.Protocol):
            def __init__(self) -> None:
                self.seen: list[bytes] = []
                self.closed = asyncio.Event()

            def data_received(self, data: bytes) -> None:
                self.seen.append(data)

            def connection_lost(self, exc: Exception | None) -> None:
                self.closed.set()

        proxy.fragment = 3
        transport, pieces = await asyncio.get_running_loop().create_connection(Pieces, proxy.host, proxy.port)
        transport.write(encode("ECHO", "0123456789") + encode("QUIT"))
        await pieces.closed.wait()
        assert b"".join(pieces.seen) == b"$10\r\n0123456789\r\n+OK\r\n"
        assert len(pieces.seen) > 3

    async def test_cut_does_not_wait_for_a_server_that_hangs(
        self, proxy: FaultProxy, wire: Wire, server: EmbeddedServer
    ) -> None:
        await wire.call("PING")
        server.pause()
        try:
            for _ in range(10):
                wire.send("SET", "k", b"v" * 1_000_000)
            await proxy.until(lambda: proxy.commands["SET"] == 10)
            await proxy.cut()
            assert await wire.rest() == b""
        finally:
            server.resume()

    async def test_closing_with_everything_in_flight(self, upstream: str) -> None:
        rules: list[Rule] = []
        async with FaultProxy(upstream) as proxy:
            opened = [Wire(*await asyncio.open_connection(proxy.host, proxy.port)) for _ in range(5)]
            for action in (
                Action.HOLD,
                Action.HOLD_REPLY,
                Action.SWALLOW_REPLY,
                Action.SWALLOW_REQUEST,
                Action.delay_reply(60),
            ):
                rules.append(proxy.on("PING", action))
            for wire in opened:
                wire.send("PING")
            for rule in rules:
                await rule.fired.wait()
        for wire in opened:
            assert await wire.rest() == b""
            await wire.close()
