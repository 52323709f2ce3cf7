"""Faults on the wire: a TCP proxy that sees whole commands, replies and pushes, and breaks them where a test wants it.

    async with FaultProxy(server) as proxy, proxy.client() as client:
        rule = proxy.on("EVALSHA", Action.CUT_AFTER)
        ...                                      # work
        await rule.fired.wait()

Each direction of a connection is a lane: what comes in is handled strictly one after the other, so whatever
delays, holds or swallows one message keeps all that follow it waiting, as on a real connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeAlias, cast

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url

from .._core import arguments
from .._core.arguments import is_async
from .._core.display import shown
from ..embedded import EmbeddedServer
from ._resp import END, Dialogue, Frame, Predicate, ProtocolError, Splitter, anything, arg, as_bytes, command, script

__all__ = [
    "Action",
    "FaultProxy",
    "Passage",
    "Rule",
    "anything",
    "arg",
    "command",
    "script",
]


class Channel(Protocol):
    """A connection through the proxy, as faults know it."""

    def close(self) -> None: ...
    def answer(self, it: Passage, reply: Frame, /) -> None: ...


@dataclass(eq=False)
class Passage:
    """A command, a reply or a push on its way, and what can be done to it.

    Attributes:
        link: The connection that it came on.
        frame: The message itself.
        rule: The rule that it matched; if it matched none, one that passes everything on.
        action: The action of that rule.
        onward: What passes a message on, in the direction of this one.
    """

    link: Channel
    frame: Frame
    rule: Rule
    action: Action
    onward: Callable[[Passage], Awaitable[None]]

    async def forward(self) -> None:
        """Pass the message on."""
        await self.onward(self)

    async def cut(self) -> None:
        """Close both sides. What was forwarded before still gets there."""
        self.link.close()
        self.rule.fired.set()

    async def cut_inside(self) -> None:
        """Pass on half of its bytes, and close both sides."""
        half = Frame(self.frame.raw[: len(self.frame.raw) // 2], self.frame.kind)
        await replace(self, frame=half).forward()
        await self.cut()

    async def cut_behind(self) -> None:
        """Pass the message on, and close both sides."""
        await self.forward()
        await self.cut()

    async def drop(self) -> None:
        """Lose the message, and nothing else."""
        self.rule.fired.set()

    async def swallow(self) -> None:
        """Keep the message, and all behind it in its direction, as long as the connection lives."""
        self.rule.fired.set()
        await asyncio.Event().wait()

    async def hold(self) -> None:
        """Keep the message, and all behind it, until ``rule.release`` is set."""
        self.rule.fired.set()
        await self.rule.release.wait()
        await self.forward()

    async def delay(self, seconds: float) -> None:
        """Keep the message, and all behind it, for so many seconds."""
        self.rule.fired.set()
        await asyncio.sleep(seconds)
        await self.forward()

    async def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        """Pass on what ``change`` makes of its bytes."""
        self.rule.fired.set()
        await replace(self, frame=replace(self.frame, raw=change(self.frame.raw))).forward()

    async def duplicate(self) -> None:
        """Send the command twice; the second reply is lost."""
        await self.forward()
        await replace(self, action=Action(reply=Passage.drop)).forward()

    async def answer(self, text: bytes) -> None:
        """Answer the command with an error, without the server."""
        self.link.answer(self, Frame(b"-%b\r\n" % text, "-", [text]))

    async def report(self) -> None:
        """Forward the message, and set ``rule.fired``."""
        await self.forward()
        self.rule.fired.set()


Fault: TypeAlias = Callable[[Passage], Awaitable[None]]
"""A coroutine function that passes on, changes or loses one command, reply or push."""


@dataclass(frozen=True)
class Action:
    """The fate of a command (or push), and of the command's reply.

    Attributes:
        request: The fault of the command or push. Default: it is passed on.
        reply: The fault of the reply to the command. Default: it is passed on.
        PASS: Passes everything on.
        CUT_BEFORE: Closes the connection, on both sides, when the command or push arrives. It is not passed on.
        CUT_AFTER: Closes the connection when the server has answered the command. The reply is lost.
        CUT_INSIDE_REPLY: Closes the connection when half of the bytes of the reply are delivered.
        CUT_AFTER_REPLY: Closes the connection when the reply is delivered.
        SWALLOW_REQUEST: Delivers neither the command or push nor anything that follows it in its direction. The
            connection stays open.
        SWALLOW_REPLY: Delivers neither the reply to the command nor anything that follows it. The connection
            stays open.
        HOLD: Keeps the command or push, and what follows it, until `Rule.release` is set.
        HOLD_REPLY: Keeps the reply to the command, and what follows it, until `Rule.release` is set.
        DUPLICATE: Sends the command twice. The second reply is lost.
        DROP: Loses the push, and nothing else.
    """

    request: Fault = Passage.forward
    reply: Fault = Passage.forward

    PASS: ClassVar[Action]
    CUT_BEFORE: ClassVar[Action]
    CUT_AFTER: ClassVar[Action]
    CUT_INSIDE_REPLY: ClassVar[Action]
    CUT_AFTER_REPLY: ClassVar[Action]
    SWALLOW_REQUEST: ClassVar[Action]
    SWALLOW_REPLY: ClassVar[Action]
    HOLD: ClassVar[Action]
    HOLD_REPLY: ClassVar[Action]
    DUPLICATE: ClassVar[Action]
    DROP: ClassVar[Action]

    def __post_init__(self) -> None:
        for fault, what in ((self.request, "request"), (self.reply, "reply")):
            if not callable(fault):
                raise TypeError(f"{what} must be a coroutine function of a Passage, not {shown(fault)}")

    @classmethod
    def delay(cls, seconds: float) -> Action:
        """Return an action: pass the command (or push), and what follows it, on so many seconds later."""
        late = arguments.seconds(seconds, "seconds")
        return cls(request=lambda it: it.delay(late))

    @classmethod
    def delay_reply(cls, seconds: float) -> Action:
        """Return an action: deliver the reply, and what follows it, so many seconds later."""
        late = arguments.seconds(seconds, "seconds")
        return cls(reply=lambda it: it.delay(late))

    @classmethod
    def answer_error(cls, text: str | bytes) -> Action:
        """Return an action: answer the command, in its turn, with an error of this text; the server does not see it."""
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"text must be str or bytes, not {shown(text)}")
        return cls(request=lambda it: it.answer(as_bytes(text)), reply=Passage.report)


Action.PASS = Action()
Action.CUT_BEFORE = Action(request=Passage.cut)
Action.CUT_AFTER = Action(reply=Passage.cut)
Action.CUT_INSIDE_REPLY = Action(reply=Passage.cut_inside)
Action.CUT_AFTER_REPLY = Action(reply=Passage.cut_behind)
Action.SWALLOW_REQUEST = Action(request=Passage.swallow)
Action.SWALLOW_REPLY = Action(reply=Passage.swallow)
Action.HOLD = Action(request=Passage.hold)
Action.HOLD_REPLY = Action(reply=Passage.hold)
Action.DUPLICATE = Action(request=Passage.duplicate)
Action.DROP = Action(request=Passage.drop)


class Rule:
    """An action for some commands or pushes, and what came of it. `FaultProxy.on` makes it.

    Attributes:
        action: What is done with those that match.
        hits: How many commands or pushes matched so far, the skipped ones included.
        acted: How often the action was taken so far.
        fired: Set when it has closed, answered or dropped; when it begins to hold, delay or swallow; or when the
            connection that it acted on has ended.
        release: Set it to pass on what HOLD and HOLD_REPLY keep.
    """

    def __init__(self, match: Predicate, action: Action, times: int | None = None, skip: int = 0) -> None:
        if not isinstance(action, Action):
            raise TypeError(
                f"action must be an Action such as Action.CUT_AFTER or Action.delay(0.1), not {shown(action)}"
            )
        self._match = match
        self._times = None if times is None else arguments.count(times, "times")
        self._skip = arguments.count(skip, "skip")
        self._cancelled = False
        self.action: Action = action
        self.hits: int = 0
        self.acted: int = 0
        self.fired: asyncio.Event = asyncio.Event()
        self.release: asyncio.Event = asyncio.Event()

    def cancel(self) -> None:
        """Match no more. What is held stays held."""
        self._cancelled = True

    def takes(self, args: list[bytes]) -> bool:
        """Count a match, and return whether the action is due."""
        if self._cancelled or not self._match(args):
            return False
        self.hits += 1
        if self.hits <= self._skip or (self._times is not None and self.acted >= self._times):
            return False
        self.acted += 1
        return True


Match: TypeAlias = Predicate | str | bytes
"""Matcher of a rule: the name of a command, a part of a push, or a predicate on the arguments."""
Upstream: TypeAlias = EmbeddedServer | tuple[str, int] | str
"""A server: itself, host and port, a URL (its credentials are those of the client's), or the path of a unix socket."""

_WAKE = Frame(b"", "wake")  # makes the downward lane look for answers that do not come from the server


class _Socket(asyncio.Protocol):
    """A connection that reports whole frames, and at last one of the kind END."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._splitter = Splitter()
        self._transport: asyncio.Transport | None = None
        self.ended = False
        self.lost = asyncio.Event()
        self.lost.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none, and does the same
        self.lost.clear()
        self._link.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self._link.received(self, frame)
        except ProtocolError as error:
            self._link.failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.lost.set()
        self._link.received(self, Frame(self._splitter.rest(), END))

    def write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_eof(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Close after what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()


class _Lane:
    """One direction of a link."""

    def __init__(self, link: _Link, handle: Callable[[Frame], Awaitable[None]]) -> None:
        self._link, self._handle = link, handle
        self._queue: asyncio.Queue[tuple[float, Frame]] = asyncio.Queue()

    def put(self, frame: Frame) -> None:
        self._queue.put_nowait((asyncio.get_running_loop().time(), frame))

    async def run(self) -> None:
        while not self._link.closed:
            arrived, frame = await self._queue.get()
            try:
                await self._link.proxy._passage(arrived)
                await self._handle(frame)
            except Exception as error:
                self._link.failed(error)


class _Link:
    """A client's connection, and its one to the server. When one closes, what it sent before still arrives."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self.client, self._server = _Socket(self), _Socket(self)
        self._up, self._down = _Lane(self, self._from_client), _Lane(self, self._from_server)
        self._dialogue: Dialogue[Passage] = Dialogue()
        self._rules: set[Rule] = set()  # that act here

    async def run(self) -> None:
        try:
            await self.proxy._connect(self._server)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up.run())
                group.create_task(self._down.run())
        except OSError:
            pass  # no server there: the client sees its connection closed
        finally:
            self.close()
            await self.client.lost.wait()
            await self._server.lost.wait()

    def opened(self, socket: _Socket) -> None:
        if socket is self.client:
            self.proxy._opened(self)
        elif self.closed:
            socket.abort()

    def received(self, socket: _Socket, frame: Frame) -> None:
        (self._up if socket is self.client else self._down).put(frame)
        if self.client.ended and self._server.ended:
            self.close()

    def failed(self, error: Exception) -> None:
        self.proxy.errors.append(error)
        self.close()

    def close(self) -> None:
        """Close both sides, after what was written to them, and pass nothing on any more."""
        if not self.closed:
            self.closed = True
            self.client.close()
            self._server.close()
            for rule in self._rules:  # a client that gave up waits for no reply
                rule.fired.set()
            if self.task is not None and self.task is not asyncio.current_task():
                self.task.cancel()
            self.proxy._notify()

    def abort(self) -> None:
        """Close both sides, also if they have not taken everything yet."""
        self.close()
        self.client.abort()
        self._server.abort()

    def answer(self, it: Passage, reply: Frame) -> None:
        """Answer a command without the server, once all before it are answered."""
        self._dialogue.ask(it, it.frame.items, reply)
        self._down.put(_WAKE)

    async def _forward_up(self, it: Passage) -> None:
        self._dialogue.ask(it, it.frame.items)
        await self.proxy._write(self._server, it.frame.raw)
        self.proxy._count(it.frame.items[0])

    async def _forward_down(self, it: Passage) -> None:
        await self.proxy._write(self.client, it.frame.raw)

    async def _from_client(self, frame: Frame) -> None:
        if frame.kind == END:
            await self.proxy._write(self._server, frame.raw)
            self._server.write_eof()
        else:
            rule = self.proxy._rule_for(frame.items)
            self._rules.add(rule)
            await rule.action.request(Passage(self, frame, rule, rule.action, self._forward_up))

    async def _from_server(self, frame: Frame) -> None:
        if frame.kind == END:
            await self.proxy._write(self.client, frame.raw)
            self.close()
        elif self._dialogue.is_push(frame):
            rule = self.proxy._rule_for(frame.items, push=True)
            await rule.action.request(Passage(self, frame, rule, rule.action, self._forward_down))
        elif frame is not _WAKE and (answered := self._dialogue.take(frame)) is not None:
            await self._reply(*answered)
        while (ready := self._dialogue.ready()) is not None:
            await self._reply(*ready)

    async def _reply(self, it: Passage | None, reply: Frame) -> None:
        if it is None:
            await self.proxy._write(self.client, reply.raw)  # what a server says before it hangs up
        else:
            await it.action.reply(replace(it, frame=reply, onward=self._forward_down))


class FaultProxy:
    """A proxy in front of a server, on a free port of 127.0.0.1, that breaks what passes where a test wants it.

    It lives in the event loop of the test. Each connection to it gets one of its own to the server.

    Args:
        upstream: The server: an `EmbeddedServer`, ``(host, port)``, a URL, or the path of a unix socket.
        tls: A context for the side of the clients; they speak TLS then. The server's side does not.

    Attributes:
        host: Its address: 127.0.0.1.
        port: Its TCP port; 0 before the ``async with``.
        refuse: Set it to close new connections immediately; with `cut` a partition that clients notice.
        black_hole: Set it to let nothing pass, and close nothing: a partition that clients do not notice.
        latency: Seconds that everything is in flight, in each direction. Set it at any time.
        fragment: The number of bytes in each piece that is passed on. 0: messages are passed on whole.
        commands: How many commands reached the server so far, by name in capitals.
        connections: How many connections were opened so far.
        errors: What was not RESP. The first one is raised at the end of the ``async with``.

    Example:
        ```python
        from redis_sync_aio import Coordinator
        from redis_sync_aio.embedded import EmbeddedServer
        from redis_sync_aio.testing.faults import Action, FaultProxy

        async with EmbeddedServer() as server, FaultProxy(server) as proxy:
            async with proxy.client() as client, Coordinator(client) as sync:
                async with sync.lock("orders:1"):  # from now on the server knows the scripts
                    pass
                rule = proxy.on("EVALSHA", Action.CUT_AFTER)  # the server grants the lock, and the answer is lost
                async with sync.lock("orders:42"):  # the command is sent again, and finds that it has the lock
                    assert rule.acted == 1
        ```
    """

    host: str = "127.0.0.1"
    _server: asyncio.Server

    def __init__(self, upstream: Upstream, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = _address_of(upstream)
        if tls is not None and not isinstance(tls, ssl.SSLContext):
            raise TypeError(f"tls must be an SSLContext, not {shown(tls)}")
        self._tls = tls
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._rules: list[Rule] = []
        self._push_rules: list[Rule] = []
        self._otherwise = Rule(anything, Action.PASS)
        self._flow, self._changed = asyncio.Event(), asyncio.Event()
        self._flow.set()
        self.errors: list[Exception] = []
        self.port: int = 0
        self.refuse: bool = False
        self.latency: float = 0.0
        self.fragment: int = 0
        self.commands: Counter[str] = Counter()
        self.connections: int = 0

    @property
    def url(self) -> str:
        """The address that clients connect to; no credentials."""
        return f"{'rediss' if self._tls else 'redis'}://{self.host}:{self.port}"

    def client(self, **kwargs: object) -> Redis:
        """Return a new client whose connections go through the proxy; options are those of `redis.asyncio.Redis`."""
        return Redis(host=self.host, port=self.port, **cast("dict[str, Any]", kwargs))

    @property
    def live(self) -> int:
        """The number of connections that are open now."""
        return sum(not link.closed for link in self._links.values())

    @property
    def black_hole(self) -> bool:
        """True if nothing passes, and no connection closes. Set to False, what was held flows on."""
        return not self._flow.is_set()

    @black_hole.setter
    def black_hole(self, value: bool) -> None:
        (self._flow.clear if value else self._flow.set)()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self).client, self.host, 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.refuse = True
        self._server.close()
        # Also those in the middle of a TLS handshake, for which `wait_closed` would wait, up to a minute.
        getattr(self._server, "abort_clients", lambda: None)()  # from Python 3.13 on, and not with uvloop
        await self.cut()
        if self.errors and kind is None:
            raise self.errors[0]

    def on(self, match: Match, action: Action, times: int | None = 1, skip: int = 0) -> Rule:
        """Apply an action to commands that match, and return the rule.

        Args:
            match: A name, as in "EVALSHA" or "CLIENT ID", or a predicate on the arguments (`arg`, `script`,
                `anything`).
            action: What happens to the command.
            times: How often the action is taken. None: always.
            skip: How many matching commands pass before that.

        If several rules match one command, the first that was made and is due acts.

        Raises:
            TypeError, ValueError: An argument is bad.
        """
        rule = Rule(_predicate(match, command), action, times, skip)
        self._rules.append(rule)
        return rule

    def on_push(self, match: Match, action: Action, times: int | None = 1, skip: int = 0) -> Rule:
        """Act on pushes, by a part of their payload or by a predicate: DROP, CUT_BEFORE, HOLD or `delay` of `Action`.

        The confirmations of SUBSCRIBE and the like are replies, not pushes.

        Raises:
            TypeError, ValueError: An argument is bad, or the action is for a reply: a push has none.
        """
        rule = Rule(_predicate(match, arg), action, times, skip)
        if action.request is Passage.forward and action.reply is not Passage.forward:
            raise ValueError("the action is for replies, and a push has none: use DROP, CUT_BEFORE, HOLD or delay()")
        self._push_rules.append(rule)
        return rule

    async def cut(self) -> None:
        """Close all connections now."""
        for link in self._links.values():
            link.abort()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which commands that pass, and connections, make true."""
        while not condition():
            await self._changed.wait()

    # -- for its connections ---------------------------------------------------------------------------

    def _opened(self, link: _Link) -> None:
        if self.refuse:
            link.abort()
            return
        self.connections += 1
        link.task = asyncio.create_task(link.run(), name="redis_sync_aio testing proxy")
        self._links[link.task] = link
        link.task.add_done_callback(self._links.pop)
        self._notify()

    async def _connect(self, side: _Socket) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._upstream, str):
            await loop.create_unix_connection(lambda: side, self._upstream)
        else:
            await loop.create_connection(lambda: side, *self._upstream)

    def _rule_for(self, items: list[bytes], *, push: bool = False) -> Rule:
        rules = self._push_rules if push else self._rules
        return next((rule for rule in rules if rule.takes(items)), self._otherwise)

    def _count(self, name: bytes) -> None:
        self.commands[name.upper().decode(errors="replace")] += 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()  # wakes all who wait now
        self._changed.clear()

    async def _passage(self, arrived: float) -> None:
        """Wait for as long as something is in flight."""
        await asyncio.sleep(max(0.0, arrived + self.latency - asyncio.get_running_loop().time()))
        await self._flow.wait()

    async def _write(self, side: _Socket, data: bytes) -> None:
        size = self.fragment or len(data) or 1
        for at in range(0, len(data), size):
            if at:
                await asyncio.sleep(0)  # one turn for the bytes to get there,
                await asyncio.sleep(0)  # one for a reader in this loop to take them
            await self._flow.wait()
            side.write(data[at : at + size])


def _predicate(match: Match, of_text: Callable[[str | bytes], Predicate]) -> Predicate:
    if isinstance(match, (str, bytes)):
        return of_text(match)
    if not callable(match) or is_async(match):
        raise TypeError(f"match must be str, bytes or a predicate on the arguments, not {shown(match)}")
    return match


def _address_of(upstream: Upstream) -> tuple[str, int] | str:
    if isinstance(upstream, EmbeddedServer):
        return upstream.unix_socket
    if isinstance(upstream, str) and "://" in upstream:
        options: dict[str, Any] = dict(parse_url(upstream))
        return options.get("path") or (options.get("host", "127.0.0.1"), options.get("port", 6379))
    if isinstance(upstream, str) or (isinstance(upstream, tuple) and [*map(type, upstream)] == [str, int]):
        return upstream
    raise TypeError(f"upstream must be an EmbeddedServer, (host, port), or a URL or path as str, not {shown(upstream)}")
