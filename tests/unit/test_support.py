"""The tools that break things for other tests do break them, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from redis_sync_aio.embedded import EmbeddedServer
from tests.support.proxy import (
    CUT_AFTER,
    CUT_AFTER_REPLY,
    CUT_BEFORE,
    CUT_INSIDE_REPLY,
    DELAY,
    DELAY_REPLY,
    DELAY_REQUEST,
    DROP,
    DUPLICATE,
    ERROR,
    HOLD,
    HOLD_REPLY,
    SWALLOW_REPLY,
    SWALLOW_REQUEST,
    FaultProxy,
    Rule,
    anything,
    arg,
    command,
    script,
)
from tests.support.resp import Dialogue, Frame, ProtocolError, Splitter, encode
from tests.support.sweep import WAYS, Outcome, Stepper, Way, sweep

A_WHILE = 0.05
"""Long enough for anything that may come to have come."""


# --- frames ------------------------------------------------------------------------------------------------

FRAMES: list[tuple[bytes, str, list[bytes]]] = [
    (b"+OK\r\n", "+", [b"OK"]),
    (b"-ERR no\r\n", "-", [b"ERR no"]),
    (b":42\r\n", ":", [b"42"]),
    (b"$5\r\nhello\r\n", "$", [b"hello"]),
    (b"$4\r\n\r\n\r\n\r\n", "$", [b"\r\n\r\n"]),
    (b"$0\r\n\r\n", "$", [b""]),
    (b"$-1\r\n", "$", [b""]),
    (b"*-1\r\n", "*", []),
    (b"*0\r\n", "*", []),
    (b"_\r\n", "_", [b""]),
    (b"#t\r\n", "#", [b"t"]),
    (b",1.5\r\n", ",", [b"1.5"]),
    (b"(123456789012345678901\r\n", "(", [b"123456789012345678901"]),
    (b"=7\r\ntxt:abc\r\n", "=", [b"txt:abc"]),
    (b"!6\r\nERR no\r\n", "!", [b"ERR no"]),
    (b"*2\r\n*1\r\n:1\r\n*2\r\n$1\r\n\n\r\n_\r\n", "*", [b"1", b"\n", b""]),
    (b"~2\r\n+a\r\n+b\r\n", "~", [b"a", b"b"]),
    (b"%2\r\n+a\r\n*0\r\n+b\r\n%1\r\n:1\r\n:2\r\n", "%", [b"a", b"b", b"1", b"2"]),
    (b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", ">", [b"message", b"c", b"m"]),
    (b"|1\r\n+ttl\r\n*1\r\n:3\r\n$1\r\nv\r\n", "$", [b"ttl", b"3", b"v"]),
    (encode("EVALSHA", b"\x00\xff\r\n*3\r\n", 0), "*", [b"EVALSHA", b"\x00\xff\r\n*3\r\n", b"0"]),
]
STREAM = b"".join(raw for raw, _, _ in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_frames_are_found_however_the_stream_is_fragmented(size: int) -> None:
    splitter = Splitter()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    frames = [frame for piece in pieces for frame in splitter.feed(piece)]
    assert [(frame.raw, frame.kind, frame.items) for frame in frames] == FRAMES
    assert splitter.rest() == b""


def test_a_frame_is_given_out_with_its_last_byte_and_not_before() -> None:
    for raw, _, _ in FRAMES:
        for at in range(len(raw)):
            splitter = Splitter()
            assert splitter.feed(raw[:at]) == []
            assert [frame.raw for frame in splitter.feed(raw[at:])] == [raw]


def test_the_rest_of_a_stream_is_the_unfinished_frame() -> None:
    splitter = Splitter()
    splitter.feed(b"+OK\r\n*2\r\n:1\r\n$3\r\nab")
    assert splitter.rest() == b"*2\r\n:1\r\n$3\r\nab"
    assert [frame.raw for frame in splitter.feed(b":1\r\n")] == [b":1\r\n"]


@pytest.mark.parametrize("raw", [b"PING\r\n", b"\r\n", b"*x\r\n", b"$?\r\n", b"$1\r\nabc\r\n"])
def test_what_is_not_resp_is_an_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        Splitter().feed(raw)


# --- replies and pushes ------------------------------------------------------------------------------------


def frame_of(*items: bytes | str | int, kind: str = ">") -> Frame:
    return Splitter().feed(kind.encode() + encode(*items)[1:])[0]


OK = Frame(b"+OK\r\n", "+", [b"OK"])


def test_replies_are_paired_in_order_and_pushes_are_not_replies() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("first", [b"GET", b"a"])
    dialogue.ask("second", [b"GET", b"b"])
    assert dialogue.is_push(frame_of("invalidate", "a"))
    assert not dialogue.is_push(frame_of("message", "c", "m", kind="*"))
    assert dialogue.take(OK) == ("first", OK)
    assert dialogue.take(OK) == ("second", OK)
    assert dialogue.take(OK) == (None, OK)


def test_a_subscription_is_answered_by_a_push_for_each_channel() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SUBSCRIBE", b"a", b"b"])
    one, two = frame_of("subscribe", "a", 1), frame_of("subscribe", "b", 2)
    assert dialogue.is_push(frame_of("message", "a", "m"))
    assert not dialogue.is_push(one)
    assert dialogue.take(one) is None
    answered = dialogue.take(two)
    assert answered is not None
    assert (answered[0], answered[1].raw) == ("sub", one.raw + two.raw)
    dialogue.ask("get", [b"GET", b"a"])
    assert dialogue.is_push(frame_of("sunsubscribe", "a", 0))  # slots move


def test_unsubscribing_from_everything_is_answered_for_each_known_channel() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"psubscribe", b"a*", b"b*"])
    dialogue.take(frame_of("psubscribe", "a*", 1))
    dialogue.take(frame_of("psubscribe", "b*", 2))
    for left in ([1, 0], [0]):  # the second time there is none left
        dialogue.ask("unsub", [b"punsubscribe"])
        for count in left:
            answered = dialogue.take(frame_of("punsubscribe", "ab"[count] + "*", count))
            assert (answered is not None) == (count == 0)


def test_a_refused_subscription_is_answered_by_an_error() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SSUBSCRIBE", b"a"])
    refused = Frame(b"-NOPERM\r\n", "-", [b"NOPERM"])
    assert dialogue.take(refused) == ("sub", refused)


def test_in_resp2_messages_are_arrays() -> None:
    dialogue: Dialogue[str] = Dialogue()
    dialogue.ask("sub", [b"SUBSCRIBE", b"a"])
    assert dialogue.take(frame_of("subscribe", "a", 1, kind="*")) is not None
    dialogue.ask("ping", [b"PING"])
    assert dialogue.is_push(frame_of("message", "a", "m", kind="*"))
    assert not dialogue.is_push(frame_of("pong", "", kind="*"))
    dialogue.ask("hello", [b"HELLO", b"3"])
    assert not dialogue.is_push(frame_of("message", "a", "m", kind="*"))


# --- the proxy ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def upstream(server: EmbeddedServer) -> str:
    return server.unix_socket


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def proxy(upstream: str, no_task_is_left: None) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(upstream) as proxy:
        yield proxy
    assert proxy.live == 0


@pytest.fixture
async def direct(upstream: str, no_task_is_left: None) -> AsyncIterator[Redis]:
    """A client that knows the truth."""
    async with Redis(unix_socket_path=upstream, decode_responses=True) as client:
        await client.flushall()
        yield client


class Wire:
    """A raw connection: commands out, whole frames in."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._splitter = Splitter()
        self._frames: list[Frame] = []

    def send(self, *args: bytes | str | int) -> None:
        self._writer.write(encode(*args))

    async def receive(self) -> bytes:
        """The next whole frame."""
        while not self._frames:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0).raw

    async def call(self, *args: bytes | str | int) -> bytes:
        self.send(*args)
        return await self.receive()

    async def rest(self) -> bytes:
        """What comes until the connection is closed."""
        frames = b"".join(frame.raw for frame in self._frames)
        return frames + self._splitter.rest() + await self._reader.read()

    async def is_silent(self) -> bool:
        """Nothing comes, and it stays open."""
        try:
            async with asyncio.timeout(A_WHILE):
                await self.receive()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


Connect = Callable[[], Any]


@pytest.fixture
async def wires(proxy: FaultProxy) -> AsyncIterator[Callable[[], Any]]:
    """Opens raw connections through the proxy."""
    opened: list[Wire] = []

    async def connect() -> Wire:
        opened.append(Wire(*await asyncio.open_connection(proxy.host, proxy.port)))
        return opened[-1]

    yield connect
    for wire in opened:
        await wire.close()


@pytest.fixture
async def wire(wires: Callable[[], Any]) -> Wire:
    opened: Wire = await wires()
    return opened


@pytest.fixture(params=[2, 3])
async def subscriber(request: pytest.FixtureRequest, wire: Wire) -> Wire:
    """Subscribed to ``news``, in RESP2 or RESP3."""
    await wire.call("HELLO", request.param)
    await wire.call("SUBSCRIBE", "news")
    return wire


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

    @pytest.mark.parametrize("protocol", [2, 3])
    async def test_subscriptions_work(self, proxy: FaultProxy, direct: Redis, protocol: int) -> None:
        async with Redis.from_url(proxy.url, protocol=protocol) as client, client.pubsub() as pubsub:
            await pubsub.subscribe("a", "b")
            await pubsub.psubscribe("c*")
            seen = [await pubsub.get_message(timeout=5) for _ in range(3)]
            await direct.publish("cd", "hello")
            seen.append(await pubsub.get_message(timeout=5))
            await pubsub.unsubscribe()
            seen += [await pubsub.get_message(timeout=5) for _ in range(2)]
        kinds = [one["type"] for one in seen if one is not None]
        assert kinds == ["subscribe"] * 2 + ["psubscribe", "pmessage"] + ["unsubscribe"] * 2

    async def test_big_values_pass(self, proxy: FaultProxy) -> None:
        proxy.fragment = 65537
        big = b"\r\n" * 1_000_000
        async with Redis.from_url(proxy.url) as client:
            await client.set("big", big)
            assert await client.get("big") == big

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
                proxy.on(lambda args: bool(args[99]), DROP)
                wire = Wire(*await asyncio.open_connection(proxy.host, proxy.port))
                wire.send("PING")
                assert await wire.rest() == b""
                await wire.close()

        with pytest.raises(IndexError):
            await mistaken()


class TestMatching:
    def test_by_name(self) -> None:
        assert command("client setinfo")([b"CLIENT", b"SETINFO", b"x"])
        assert not command("CLIENT SETINFO")([b"CLIENT"])
        assert not command(b"GET")([b"GETEX", b"k"])
        assert anything([b"HELLO"])

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
        rule = proxy.on("ping", ERROR("ERR mine"), times=2, skip=1)
        replies = [await wire.call("PING") for _ in range(4)]
        assert replies == [b"+PONG\r\n", b"-ERR mine\r\n", b"-ERR mine\r\n", b"+PONG\r\n"]
        assert (rule.hits, rule.acted, proxy.commands["PING"]) == (4, 2, 2)
        endless = proxy.on("PING", ERROR("ERR more"), times=None)
        assert {await wire.call("PING") for _ in range(5)} == {b"-ERR more\r\n"}
        endless.cancel()
        assert await wire.call("PING") == b"+PONG\r\n"

    async def test_the_first_rule_that_is_due_acts(self, proxy: FaultProxy, wire: Wire) -> None:
        first, second = proxy.on(anything, ERROR("ERR 1")), proxy.on("PING", ERROR("ERR 2"))
        assert [await wire.call("PING") for _ in range(3)] == [b"-ERR 1\r\n", b"-ERR 2\r\n", b"+PONG\r\n"]
        assert (first.hits, second.hits) == (3, 2)


class TestActions:
    async def test_cut_before(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", CUT_BEFORE)
        wire.send("SET", "k", 0)
        wire.send("INCR", "k")
        wire.send("INCR", "k")
        await wire.rest()
        assert rule.fired.is_set()
        assert await direct.get("k") == "0"
        assert (rule.hits, proxy.commands["INCR"], proxy.live) == (1, 0, 0)

    async def test_cut_after(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("BLPOP", CUT_AFTER)
        wire.send("BLPOP", "k", 0)
        assert await wire.is_silent()
        assert not rule.fired.is_set()
        await direct.lpush("k", "v")
        assert await wire.rest() == b""
        assert rule.fired.is_set()
        assert await direct.exists("k") == 0

    async def test_cut_inside_reply(self, proxy: FaultProxy, wire: Wire) -> None:
        await wire.call("SET", "k", "v" * 100)
        rule = proxy.on("GET", CUT_INSIDE_REPLY)
        wire.send("GET", "k")
        wire.send("PING")
        reply = b"$100\r\n" + b"v" * 100 + b"\r\n"
        assert await wire.rest() == reply[:54]
        assert rule.fired.is_set()

    async def test_swallow_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", SWALLOW_REPLY)
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
        rule = proxy.on("PING", SWALLOW_REQUEST)
        wire.send("PING")
        await rule.fired.wait()
        wire.send("UNSUBSCRIBE", "news")
        assert await wire.is_silent()
        assert await direct.publish("news", "x") == 1
        assert b"message" in await wire.receive()  # the other direction works
        assert (proxy.commands["UNSUBSCRIBE"], proxy.live) == (0, 1)

    async def test_delay_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", DELAY_REPLY(0.2))
        started = asyncio.get_running_loop().time()
        wire.send("INCR", "k")
        wire.send("PING")
        await rule.fired.wait()
        assert await direct.get("k") == "1"
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"+PONG\r\n"]
        assert asyncio.get_running_loop().time() - started >= 0.2

    async def test_delay_request(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", DELAY_REQUEST(0.2))
        started = asyncio.get_running_loop().time()
        wire.send("INCR", "k")
        wire.send("GET", "k")
        await rule.fired.wait()
        assert await direct.get("k") is None
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"$1\r\n1\r\n"]
        assert asyncio.get_running_loop().time() - started >= 0.2

    async def test_duplicate(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", DUPLICATE)
        wire.send("INCR", "k")
        wire.send("GET", "k")
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"$1\r\n2\r\n"]
        assert rule.fired.is_set()
        assert (rule.hits, proxy.commands["INCR"]) == (1, 2)

    async def test_error_comes_in_its_turn(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        before, rule = proxy.on("PING", HOLD_REPLY), proxy.on("INCR", ERROR("READONLY You can't write"))
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

    async def test_error_reaches_a_client(self, proxy: FaultProxy) -> None:
        async with Redis.from_url(proxy.url) as client:
            proxy.on("SET", ERROR("MISCONF not now"))
            with pytest.raises(ResponseError, match="MISCONF not now"):
                await client.set("k", "v")
            assert await client.set("k", "v")

    async def test_cut_after_reply(self, proxy: FaultProxy, wire: Wire) -> None:
        await wire.call("HELLO", 3)
        await wire.call("SUBSCRIBE", "news")
        rule = proxy.on("PUBLISH", CUT_AFTER_REPLY, skip=1)
        assert await wire.call("PUBLISH", "news", "x") == b":1\r\n"
        assert b"message" in await wire.receive()
        wire.send("PUBLISH", "news", "y")
        assert await wire.rest() == b":1\r\n"
        assert rule.fired.is_set()

    async def test_hold(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", HOLD)
        wire.send("INCR", "k")
        wire.send("PING")
        await rule.fired.wait()
        assert await wire.is_silent()
        assert await direct.get("k") is None
        rule.release.set()
        assert [await wire.receive() for _ in range(2)] == [b":1\r\n", b"+PONG\r\n"]

    async def test_hold_reply(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", HOLD_REPLY)
        wire.send("INCR", "k")
        await rule.fired.wait()
        assert await direct.get("k") == "1"
        assert await wire.is_silent()
        rule.release.set()
        assert await wire.receive() == b":1\r\n"

    async def test_a_held_command_reaches_the_server_after_its_client_has_gone(
        self, proxy: FaultProxy, wire: Wire, direct: Redis
    ) -> None:
        rule = proxy.on("INCR", HOLD)
        wire.send("INCR", "k")
        await rule.fired.wait()
        await wire.close()
        await direct.set("k", 41)
        rule.release.set()
        await proxy.until(lambda: proxy.live == 0)
        assert await direct.get("k") == "42"

    @pytest.mark.parametrize("action", [CUT_AFTER, CUT_INSIDE_REPLY, CUT_BEFORE])
    async def test_a_client_sees_a_cut_as_a_connection_error(self, proxy: FaultProxy, action: Any) -> None:
        async with Redis.from_url(proxy.url) as client:
            await client.ping()
            proxy.on("SET", action)
            with pytest.raises(RedisConnectionError):
                await client.set("k", "v")
            assert await client.ping()
            assert (proxy.connections, proxy.live) == (2, 1)


class TestSubscriptions:
    async def test_the_confirmation_is_the_reply(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on("SUBSCRIBE", HOLD_REPLY)
        subscriber.send("SUBSCRIBE", "a", "b")
        await rule.fired.wait()
        assert await direct.publish("b", "x") == 1
        assert await subscriber.is_silent()
        rule.release.set()
        frames = [await subscriber.receive() for _ in range(3)]
        kinds = [Splitter().feed(frame)[0].items[0] for frame in frames]
        assert kinds == [b"subscribe", b"subscribe", b"message"]

    async def test_cut_after_a_subscription(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on("UNSUBSCRIBE", CUT_AFTER)
        subscriber.send("UNSUBSCRIBE")
        assert await subscriber.rest() == b""
        assert rule.fired.is_set()

    async def test_a_push_is_no_reply(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        held = proxy.on("PING", HOLD)
        subscriber.send("PING")
        await held.fired.wait()
        await direct.publish("news", "x")
        assert b"message" in await subscriber.receive()
        rule = proxy.on("PING", CUT_AFTER)
        held.release.set()
        assert b"PONG" in (await subscriber.receive()).upper()
        assert not rule.fired.is_set()

    async def test_drop(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on_push(b"lost", DROP)
        await direct.publish("news", "lost")
        await direct.publish("news", "found")
        assert b"found" in await subscriber.receive()
        assert rule.fired.is_set()
        assert rule.hits == 1

    async def test_cut_before(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on_push(lambda items: items[-1] == b"x", CUT_BEFORE)
        await direct.publish("news", "x")
        assert await subscriber.rest() == b""
        assert rule.fired.is_set()

    async def test_delay(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        proxy.on_push("x", DELAY(0.2))
        started = asyncio.get_running_loop().time()
        await direct.publish("news", "x")
        subscriber.send("PING")
        assert b"message" in await subscriber.receive()
        assert asyncio.get_running_loop().time() - started >= 0.2
        assert b"PONG" in (await subscriber.receive()).upper()

    async def test_hold(self, proxy: FaultProxy, subscriber: Wire, direct: Redis) -> None:
        rule = proxy.on_push("x", HOLD)
        await direct.publish("news", "x")
        await rule.fired.wait()
        assert await subscriber.is_silent()
        rule.release.set()
        assert b"message" in await subscriber.receive()


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
        held = proxy.on("INCR", HOLD)
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

    async def test_a_black_hole_takes_what_is_on_its_way(self, proxy: FaultProxy, wire: Wire, direct: Redis) -> None:
        rule = proxy.on("INCR", HOLD_REPLY)
        wire.send("INCR", "k")
        await rule.fired.wait()
        proxy.black_hole = True
        rule.release.set()
        assert await wire.is_silent()
        proxy.black_hole = False
        assert await wire.receive() == b":1\r\n"

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
            for action in (HOLD, HOLD_REPLY, SWALLOW_REPLY, SWALLOW_REQUEST, DELAY_REPLY(60)):
                rules.append(proxy.on("PING", action))
            for wire in opened:
                wire.send("PING")
            for rule in rules:
                await rule.fired.wait()
        for wire in opened:
            assert await wire.rest() == b""
            await wire.close()


# --- the sweep ---------------------------------------------------------------------------------------------


async def ignore(outcome: Outcome[Any]) -> None:
    """Nothing can be left behind."""


def soon(value: Any = None) -> asyncio.Future[Any]:
    """A future that is done some turns of the loop later."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        elif not future.done():
            future.set_result(value)

    turn(3)
    return future


class TestStepper:
    async def test_counts_every_suspension(self) -> None:
        async def operation() -> str:
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            await future  # done already: none
            await asyncio.gather(soon(), soon())
            async with asyncio.timeout(5):
                return str(await soon("value"))

        points: list[tuple[int, bool]] = []
        stepper = Stepper(operation(), lambda n, waiting: points.append((n, waiting is None)))
        assert await stepper == "value"
        assert points == [(1, True), (2, False), (3, False), (4, False)]
        assert (stepper.points, stepper.cancelled_at) == (4, None)

    async def test_passes_errors_both_ways(self) -> None:
        async def operation() -> None:
            future = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(future.set_exception, KeyError("in"))
            try:
                await future
            except KeyError as error:
                raise ValueError("out") from error

        with pytest.raises(ValueError, match="out"):
            await Stepper(operation(), lambda n, waiting: None)


class TestSweep:
    async def test_a_correct_operation_passes(self) -> None:
        held: set[object] = set()

        async def operation() -> object:
            await asyncio.sleep(0)
            token = object()
            held.add(token)
            try:
                await soon()
                await asyncio.sleep(0.001)
            except BaseException:
                held.discard(token)
                raise
            return token

        async def check(outcome: Outcome[object]) -> None:
            held.discard(outcome.value)
            assert not held

        result = await sweep(operation, check)
        assert result.cancellations == {"task": 3, "same_turn": 3, "scope": 3}
        assert result.swallowed == []
        assert len(result.outcomes) == 12
        assert [one.value is None for one in result.outcomes] == [True, True, True, False] * 3

    @pytest.mark.parametrize("way", WAYS)
    async def test_the_same_turn_way_makes_result_and_cancellation_meet(self, way: Way) -> None:
        states: list[str] = []

        async def operation() -> None:
            future = soon("a result")
            try:
                await future
            except asyncio.CancelledError:
                states.append("cancelled" if future.cancelled() else future.result())
                raise

        await sweep(operation, ignore, ways=[way])
        assert states == ["a result" if way == "same_turn" else "cancelled"]

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_swallowed_cancellation_is_caught(self, way: Way) -> None:
        async def operation() -> str:
            await asyncio.sleep(0)
            try:
                await soon()
            except asyncio.CancelledError:
                return "as if nothing were"
            return "done"

        with pytest.raises(AssertionError, match=rf"swallowed: way '{way}', suspension point n=2"):
            await sweep(operation, ignore, ways=[way])
        result = await sweep(operation, ignore, ways=[way], strict=False)
        assert [(one.way, one.n, one.value) for one in result.swallowed] == [(way, 2, "as if nothing were")]
        assert result.cancellations == {way: 2}

    async def test_it_finds_what_wait_for_swallows_on_old_pythons(self) -> None:
        async def inner() -> str:
            return str(await soon("result"))

        result = await sweep(lambda: asyncio.wait_for(inner(), 5), ignore, strict=False)
        swallowed = {one.way for one in result.swallowed}
        assert swallowed == ({"same_turn"} if sys.version_info < (3, 12) else set())

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_leak_is_caught_by_the_check(self, way: Way) -> None:
        held: list[str] = []

        async def operation() -> None:
            await asyncio.sleep(0)
            held.append("it")
            await soon()
            held.remove("it")

        async def check(outcome: Outcome[None]) -> None:
            assert not held

        with pytest.raises(AssertionError) as caught:
            await sweep(operation, check, ways=[way])
        assert caught.value.__notes__ == [f"in the check after: way '{way}', suspension point n=2"]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("first", ["give back", "wait"])
    async def test_a_clean_up_that_can_be_interrupted_is_caught_by_a_second_cancellation(
        self, way: Way, first: str
    ) -> None:
        held: list[str] = []

        async def operation() -> None:
            held.append("it")
            try:
                await soon()
            except asyncio.CancelledError:
                if first == "give back":
                    held.clear()
                with anyio.CancelScope(shield=True):
                    await soon()
                held.clear()
                raise
            held.clear()

        async def check(outcome: Outcome[None]) -> None:
            assert not held

        assert (await sweep(operation, check, ways=[way])).cancellations == {way: 1}
        if first == "give back":
            result = await sweep(operation, check, ways=[way], twice=True)
            assert [(one.cancelled, one.twice) for one in result.outcomes] == [(True, True), (False, False)]
        else:
            with pytest.raises(AssertionError) as caught:
                await sweep(operation, check, ways=[way], twice=True)
            assert caught.value.__notes__[0].endswith("n=1, cancelled twice")

    async def test_a_scope_is_not_blamed_for_what_was_over_before_it_could_cancel(self) -> None:
        async def operation() -> str:
            future = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(future.set_result, "result")
            return str(await future)

        result = await sweep(operation, ignore)
        assert result.cancellations == {"task": 1, "same_turn": 1}
        assert [one.missed for one in result.outcomes if one.way == "scope"] == [True, False]

    async def test_a_shield_without_a_checkpoint_after_it_swallows(self) -> None:
        async def shielded(checkpoint: bool) -> None:
            with anyio.CancelScope(shield=True):
                await soon()
            if checkpoint:
                await anyio.lowlevel.checkpoint_if_cancelled()

        await sweep(lambda: shielded(True), ignore, ways=["scope"])
        with pytest.raises(AssertionError, match="swallowed: way 'scope', suspension point n=1"):
            await sweep(lambda: shielded(False), ignore, ways=["scope"])

    async def test_an_error_instead_of_the_cancellation_is_caught(self) -> None:
        async def operation() -> None:
            try:
                await soon()
            except asyncio.CancelledError:
                raise ConnectionError("lost") from None

        with pytest.raises(AssertionError, match=r"ConnectionError.*way 'task', suspension point n=1") as caught:
            await sweep(operation, ignore)
        assert isinstance(caught.value.__cause__, ConnectionError)

    async def test_an_operation_without_end_is_caught(self) -> None:
        async def operation() -> None:
            while True:
                await asyncio.sleep(0)

        with pytest.raises(AssertionError, match="still not undisturbed after 5"):
            await sweep(operation, ignore, limit=5)
