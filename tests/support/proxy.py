"""A TCP proxy that sees whole commands, replies and pushes, and breaks them where a test wants it.

    async with FaultProxy(upstream="/path/of/a.sock") as proxy:
        rule = proxy.on("EVALSHA", CUT_AFTER)
        ...                                      # connect to proxy.url, work
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
from typing import Self

from .resp import END, Dialogue, Frame, Predicate, Socket, as_bytes
from .resp import anything as anything
from .resp import arg as arg
from .resp import command as command
from .resp import script as script

Match = Predicate | str | bytes

_WAKE = Frame(b"", "wake")  # makes the downward lane look for answers that do not come from the server


@dataclass(eq=False)
class Passage:
    """A command, a reply or a push on its way, and what can be done to it."""

    link: _Link
    frame: Frame
    rule: Rule
    action: Action
    onward: Callable[[Passage], Awaitable[None]]

    async def forward(self) -> None:
        await self.onward(self)

    async def cut(self) -> None:
        """Close both sides. What was forwarded before still gets there."""
        self.link.close()
        self.rule.fired.set()

    async def cut_inside(self) -> None:
        half = Frame(self.frame.raw[: len(self.frame.raw) // 2], self.frame.kind)
        await replace(self, frame=half).forward()
        await self.cut()

    async def cut_behind(self) -> None:
        await self.forward()
        await self.cut()

    async def drop(self) -> None:
        self.rule.fired.set()

    async def swallow(self) -> None:
        """Never come to an end; nor does the lane go on, as long as the connection lives."""
        self.rule.fired.set()
        await asyncio.Event().wait()

    async def hold(self) -> None:
        self.rule.fired.set()
        await self.rule.release.wait()
        await self.forward()

    async def delay(self, seconds: float) -> None:
        self.rule.fired.set()
        await asyncio.sleep(seconds)
        await self.forward()

    async def rewrite(self, change: Callable[[bytes], bytes]) -> None:
        self.rule.fired.set()
        await replace(self, frame=replace(self.frame, raw=change(self.frame.raw))).forward()

    async def duplicate(self) -> None:
        await self.forward()
        await replace(self, action=Action(reply=Passage.drop)).forward()

    async def answer(self, text: bytes) -> None:
        self.link.answer(self, Frame(b"-%b\r\n" % text, "-", [text]))

    async def tell(self) -> None:
        await self.forward()
        self.rule.fired.set()


Fault = Callable[[Passage], Awaitable[None]]


@dataclass(frozen=True)
class Action:
    """What happens to a command (or push), and what to the command's reply."""

    request: Fault = Passage.forward
    reply: Fault = Passage.forward


# CUT closes both sides, SWALLOW makes a black hole of one direction, HOLD waits for ``rule.release``.
PASS = Action()
CUT_BEFORE = Action(request=Passage.cut)  # when the command (or push) arrives; it goes no further
CUT_AFTER = Action(reply=Passage.cut)  # when the server has answered the command; the answer is lost
CUT_INSIDE_REPLY = Action(reply=Passage.cut_inside)  # when half of the reply's bytes are delivered
CUT_AFTER_REPLY = Action(reply=Passage.cut_behind)  # when the reply is delivered, and nothing later
SWALLOW_REQUEST = Action(request=Passage.swallow)  # upwards, from this command on
SWALLOW_REPLY = Action(reply=Passage.swallow)  # downwards, from the reply of this command on
HOLD = Action(request=Passage.hold)  # keep the command (or push) and what follows it
HOLD_REPLY = Action(reply=Passage.hold)  # keep the reply and what follows it
DUPLICATE = Action(request=Passage.duplicate)  # send the command twice; the second reply is lost
DROP = Action(request=Passage.drop)  # lose a push and nothing else


def DELAY(seconds: float) -> Action:
    """Pass the command (or push), and what follows it, on so many seconds later."""
    return Action(request=lambda it: it.delay(seconds))


DELAY_REQUEST = DELAY


def DELAY_REPLY(seconds: float) -> Action:
    """Deliver the reply, and what follows it, so many seconds later."""
    return Action(reply=lambda it: it.delay(seconds))


def ERROR(text: str | bytes) -> Action:
    """Do not pass the command on, but answer it, in its turn, with an error of this text."""
    return Action(request=lambda it: it.answer(as_bytes(text)), reply=Passage.tell)


class Rule:
    """An action for some commands or pushes, and what came of it."""

    def __init__(self, match: Predicate, action: Action, times: int | None = None, skip: int = 0) -> None:
        self._match, self._times, self._skip = match, times, skip
        self._cancelled = False
        self.action = action
        self.hits = 0  # that matched, the skipped ones too
        self.acted = 0  # that the action was taken for
        self.fired = asyncio.Event()  # has closed, answered, dropped; begins to hold, delay, swallow; or its link ended
        self.release = asyncio.Event()  # lets what HOLD and HOLD_REPLY keep go on

    def cancel(self) -> None:
        """Match no more. What is held stays held."""
        self._cancelled = True

    def takes(self, args: list[bytes]) -> bool:
        """Count a match; is the action due?"""
        if self._cancelled or not self._match(args):
            return False
        self.hits += 1
        if self.hits <= self._skip or (self._times is not None and self.acted >= self._times):
            return False
        self.acted += 1
        return True


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
                await self._link.proxy.passage(arrived)
                await self._handle(frame)
            except Exception as error:
                self._link.failed(error)


class _Link:
    """A client's connection, and its one to the server. When one closes, what it sent before still arrives."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self.client, self._server = Socket(self), Socket(self)
        self._up, self._down = _Lane(self, self._from_client), _Lane(self, self._from_server)
        self._dialogue: Dialogue[Passage] = Dialogue()
        self._rules: set[Rule] = set()  # that act here

    async def run(self) -> None:
        try:
            await self.proxy.connect(self._server)
            async with asyncio.TaskGroup() as lanes:
                lanes.create_task(self._up.run())
                lanes.create_task(self._down.run())
        except OSError:
            pass  # no server there: the client sees its connection closed
        finally:
            self.close()
            await self.client.lost.wait()
            await self._server.lost.wait()

    def opened(self, socket: Socket) -> None:
        if socket is self.client:
            self.proxy.opened(self)
        elif self.closed:
            socket.abort()

    def received(self, socket: Socket, frame: Frame) -> None:
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
            self.proxy.changed()

    def abort(self) -> None:
        """Close both sides, whatever they have not taken yet."""
        self.close()
        self.client.abort()
        self._server.abort()

    def answer(self, it: Passage, reply: Frame) -> None:
        """Answer a command without the server, once all before it are answered."""
        self._dialogue.ask(it, it.frame.items, reply)
        self._down.put(_WAKE)

    async def _forward_up(self, it: Passage) -> None:
        self._dialogue.ask(it, it.frame.items)
        await self.proxy.write(self._server, it.frame.raw)
        self.proxy.count(it.frame.items[0])

    async def _forward_down(self, it: Passage) -> None:
        await self.proxy.write(self.client, it.frame.raw)

    async def _from_client(self, frame: Frame) -> None:
        if frame.kind == END:
            await self.proxy.write(self._server, frame.raw)
            self._server.write_eof()
        else:
            rule = self.proxy.rule_for(frame.items)
            self._rules.add(rule)
            await rule.action.request(Passage(self, frame, rule, rule.action, self._forward_up))

    async def _from_server(self, frame: Frame) -> None:
        if frame.kind == END:
            await self.proxy.write(self.client, frame.raw)
            self.close()
        elif self._dialogue.is_push(frame):
            rule = self.proxy.rule_for(frame.items, push=True)
            await rule.action.request(Passage(self, frame, rule, rule.action, self._forward_down))
        elif frame is not _WAKE and (answered := self._dialogue.take(frame)) is not None:
            await self._reply(*answered)
        while (ready := self._dialogue.ready()) is not None:
            await self._reply(*ready)

    async def _reply(self, it: Passage | None, reply: Frame) -> None:
        if it is None:
            await self.proxy.write(self.client, reply.raw)  # what a server says before it hangs up
        else:
            await it.action.reply(replace(it, frame=reply, onward=self._forward_down))


class FaultProxy:
    """Listens on a free port of 127.0.0.1, perhaps with TLS; each connection gets its own one to ``upstream``."""

    host = "127.0.0.1"
    _server: asyncio.Server

    def __init__(self, upstream: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._tls = tls
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._rules: list[Rule] = []
        self._push_rules: list[Rule] = []
        self._otherwise = Rule(anything, PASS)
        self._flow, self._changed = asyncio.Event(), asyncio.Event()
        self._flow.set()
        self.errors: list[Exception] = []
        self.port = 0
        self.refuse = False  # close new connections immediately
        self.latency = 0.0  # seconds that everything is in flight, in each direction
        self.fragment = 0  # pass everything on in pieces of so many bytes; 0: whole
        self.commands: Counter[str] = Counter()  # passed on to the server, by name in capitals
        self.connections = 0  # opened so far

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    @property
    def live(self) -> int:
        """Connections open now."""
        return sum(not link.closed for link in self._links.values())

    @property
    def black_hole(self) -> bool:
        """Nothing passes in any direction and no connection closes; set to False, what was held flows on."""
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
        await self.cut()
        await self._server.wait_closed()
        if self.errors and kind is None:
            raise self.errors[0]

    def on(self, match: Match, action: Action, times: int | None = 1, skip: int = 0) -> Rule:
        """Act on commands, by name or by a predicate on their arguments: so many ``times``, after ``skip``.

        Of several rules for one command, the first one made that is due acts.
        """
        rule = Rule(match if callable(match) else command(match), action, times, skip)
        self._rules.append(rule)
        return rule

    def on_push(self, match: Match, action: Action, times: int | None = 1, skip: int = 0) -> Rule:
        """Act on pushes, by a part of their payload or by a predicate: DROP, CUT_BEFORE, DELAY or HOLD.

        The confirmations of SUBSCRIBE and the like are replies, not pushes.
        """
        rule = Rule(match if callable(match) else arg(match), action, times, skip)
        self._push_rules.append(rule)
        return rule

    async def cut(self) -> None:
        """Close all connections now."""
        for link in self._links.values():
            link.abort()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that commands and connections passing by make true."""
        while not condition():
            await self._changed.wait()

    def opened(self, link: _Link) -> None:
        if self.refuse:
            link.abort()
            return
        self.connections += 1
        link.task = asyncio.create_task(link.run())
        self._links[link.task] = link
        link.task.add_done_callback(self._links.pop)
        self.changed()

    async def connect(self, side: Socket) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._upstream, str):
            await loop.create_unix_connection(lambda: side, self._upstream)
        else:
            await loop.create_connection(lambda: side, *self._upstream)

    def rule_for(self, items: list[bytes], *, push: bool = False) -> Rule:
        rules = self._push_rules if push else self._rules
        return next((rule for rule in rules if rule.takes(items)), self._otherwise)

    def count(self, name: bytes) -> None:
        self.commands[name.upper().decode(errors="replace")] += 1
        self.changed()

    def changed(self) -> None:
        self._changed.set()  # wakes all who wait now
        self._changed.clear()

    async def passage(self, arrived: float) -> None:
        """The way that something has before it."""
        await asyncio.sleep(max(0.0, arrived + self.latency - asyncio.get_running_loop().time()))
        await self._flow.wait()

    async def write(self, side: Socket, data: bytes) -> None:
        size = self.fragment or len(data) or 1
        for at in range(0, len(data), size):
            if at:
                await asyncio.sleep(0)  # one turn for the bytes to get there,
                await asyncio.sleep(0)  # one for a reader in this loop to take them
            await self._flow.wait()
            side.write(data[at : at + size])
