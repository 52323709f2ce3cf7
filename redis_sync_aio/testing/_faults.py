"""The faults that a `FaultProxy` makes: what it does to commands, replies and pushes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from .._core import arguments
from .._core.display import shown
from ._resp import Frame, Predicate, as_bytes


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
        """Pass it on."""
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
        """Pass it on, and close both sides."""
        await self.forward()
        await self.cut()

    async def drop(self) -> None:
        """Lose it, and nothing else."""
        self.rule.fired.set()

    async def swallow(self) -> None:
        """Keep it, and what follows in its direction, as long as the connection lives."""
        self.rule.fired.set()
        await asyncio.Event().wait()

    async def hold(self) -> None:
        """Keep it, and what follows, until ``rule.release`` is set."""
        self.rule.fired.set()
        await self.rule.release.wait()
        await self.forward()

    async def delay(self, seconds: float) -> None:
        """Keep it, and what follows, for so many seconds."""
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
        """Forward it, and set ``rule.fired``."""
        await self.forward()
        self.rule.fired.set()


Fault: TypeAlias = Callable[[Passage], Awaitable[None]]
"""A coroutine function that passes on, changes or loses one command, reply or push."""


@dataclass(frozen=True)
class Action:
    """The fate of a command (or push), and of the command's reply.

    Attributes:
        request: What is done with the command or push. Default: it is passed on.
        reply: What is done with the reply to the command. Default: it is passed on.
    """

    request: Fault = Passage.forward
    reply: Fault = Passage.forward

    def __post_init__(self) -> None:
        for fault, what in ((self.request, "request"), (self.reply, "reply")):
            if not callable(fault):
                raise TypeError(f"{what} must be a coroutine function of a Passage, not {shown(fault)}")


PASS = Action()
"""Passes everything on."""
CUT_BEFORE = Action(request=Passage.cut)
"""Closes the connection, on both sides, when the command or push arrives. It is not passed on."""
CUT_AFTER = Action(reply=Passage.cut)
"""Closes the connection when the server has answered the command. The reply is lost."""
CUT_INSIDE_REPLY = Action(reply=Passage.cut_inside)
"""Closes the connection when half of the bytes of the reply are delivered."""
CUT_AFTER_REPLY = Action(reply=Passage.cut_behind)
"""Closes the connection when the reply is delivered."""
SWALLOW_REQUEST = Action(request=Passage.swallow)
"""Delivers neither the command or push nor anything that follows it in its direction. The connection stays open."""
SWALLOW_REPLY = Action(reply=Passage.swallow)
"""Delivers neither the reply to the command nor anything that follows it. The connection stays open."""
HOLD = Action(request=Passage.hold)
"""Keeps the command or push, and what follows it, until `Rule.release` is set."""
HOLD_REPLY = Action(reply=Passage.hold)
"""Keeps the reply to the command, and what follows it, until `Rule.release` is set."""
DUPLICATE = Action(request=Passage.duplicate)
"""Sends the command twice. The second reply is lost."""
DROP = Action(request=Passage.drop)
"""Loses the push, and nothing else."""


def delay(seconds: float) -> Action:
    """Return an action: pass the command (or push), and what follows it, on so many seconds later."""
    late = arguments.seconds(seconds, "seconds")
    return Action(request=lambda it: it.delay(late))


def delay_reply(seconds: float) -> Action:
    """Return an action: deliver the reply, and what follows it, so many seconds later."""
    late = arguments.seconds(seconds, "seconds")
    return Action(reply=lambda it: it.delay(late))


def answer_error(text: str | bytes) -> Action:
    """Return an action: answer the command, in its turn, with an error of this text; the server does not see it."""
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"text must be str or bytes, not {shown(text)}")
    return Action(request=lambda it: it.answer(as_bytes(text)), reply=Passage.report)


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
            raise TypeError(f"action must be an Action, such as CUT_AFTER or delay(0.1), not {shown(action)}")
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
