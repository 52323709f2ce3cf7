"""The common part of all dialogues: reading replies, MULTI and EXEC, and refusals of those.

See `watch` for what a dialogue is. Nothing here distinguishes locks from permits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

from .._client.replies import Argument, Reply, ReplyError, Words, error_code, unpack
from .._core.display import text
from .._scripts.constants import NOT_OURS, QUEUE_TTL_MS
from .._transport.dialogues import CONFLICT, Dialogue, LocalInbox
from .snapshot import LockSnapshot, Message, PermitSnapshot

WINDOW = 16
"""Tickets at the head of a queue that are read first. If a decision reaches the last of them, more are read."""


class WatchRefused(Exception):
    """A command was refused when it was queued, so nothing was executed."""

    def __init__(self, command: bytes, error: ReplyError) -> None:
        super().__init__(str(error))
        self.command = command
        self.code = error_code(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class WritePlan:
    """A decision, and how it is written."""

    reply: Reply
    writes: list[Words]
    messages: tuple[Message, ...] = ()
    without: Reply = None
    """The reply to a request that waits already, if nothing can be written now."""
    more: bool = False
    """True if this is only a part of the decision, without a reply: once it is written the rest is decided."""


Snapshot: TypeAlias = LockSnapshot | PermitSnapshot


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue, as far as it was read."""

    queue: bytes  # the keys
    polls: bytes
    tail: int  # the place of the last ticket
    more: bool  # there are tickets behind those that were read
    own: bytes  # the caller's ticket; at the end of the snapshot's queue if it is among the tickets behind
    former: int | None = None  # the place that it had, if the request is repeated

    def ended(self, before: Snapshot, after: Snapshot) -> bool:
        """Return whether a decision reached the last ticket that was read, and there are more."""
        return self.more and sum(member in after.queue for member in before.queue if member != self.own) < 2

    def writes(self, before: Snapshot, after: Snapshot, ahead: bytes = b"") -> list[Words]:
        """Return the commands that bring the queue to the state ``after``; ``ahead``: a ticket before all others.

        The place of any other ticket is the time of its arrival.
        """
        found: list[Words] = []
        gone = [member for member in before.queue if member not in after.queue]
        new = [member for member in after.queue if member not in before.queue]
        if gone:
            found.append((b"ZREM", self.queue, *gone))
        for number, member in enumerate(new, max(self.tail + 1, before.now)):
            place = self.former if self.former and member == self.own and self.former < before.now else number
            found.append((b"ZADD", self.queue, -1 if member == ahead else place, member))
        if self.own in after.queue:  # each waiter asks again from time to time, far more often than that
            found.append((b"PEXPIRE", self.queue, QUEUE_TTL_MS))
        silent = [member for member in before.polls if member not in after.polls]
        if silent:
            found.append((b"ZREM", self.polls, *silent))
        for member, until in after.polls.items():
            if before.polls.get(member) != until:
                found += [(b"ZADD", self.polls, until, member), (b"PEXPIRE", self.polls, QUEUE_TTL_MS)]
        return found


WireKeys: TypeAlias = tuple[bytes, ...]
"""The keys of a name, in the order of its scripts: name, queue, fence, polls; or permits, state, queue, polls."""
Decide: TypeAlias = Callable[[bool, bool], Dialogue]
"""``decide(mute, full)`` reads and returns a `WritePlan`; mute: we may not publish; full: the server has no memory."""


def checked(replies: Iterable[Reply]) -> list[Reply]:
    """Return ``replies``, or raise the first error among them."""
    found = list(replies)
    for reply in found:
        if isinstance(reply, ReplyError):
            raise reply
    return found


def pairs(reply: Any) -> list[tuple[bytes, float]]:
    """Return members and scores: RESP3 has them in pairs, RESP2 in a row."""
    if reply and isinstance(reply[0], list):
        return [(member, float(score)) for member, score in reply]
    return [(member, float(score)) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def not_ours(key: bytes, problem: str) -> ReplyError:
    """Return the error that a script raises for data of another program under ``key``."""
    return ReplyError(f"WRONGTYPE {text(key)} {NOT_OURS.decode()}: {problem}")


def place_of(key: bytes, tail: Reply) -> int:
    """Return the place of the last ticket in the queue ``key``, 0 if there is none."""
    try:
        return int(pairs(tail)[0][1]) if tail else 0
    except OverflowError:
        raise not_ours(key, "an entry has an infinite score") from None


def blob(word: Argument) -> bytes:
    """Return an argument of a script as bytes."""
    return b"%d" % word if isinstance(word, int) else word


def number_at(words: Words, index: int) -> int | None:
    """Return an optional argument of a script; None if it is missing or empty."""
    return int(words[index]) if words[index:] and words[index] != b"" else None


def microseconds(time: Reply) -> int:
    """Return the time in a reply to TIME, in microseconds."""
    return int(time[0]) * 1_000_000 + int(time[1])


def deaf(reply: Reply) -> frozenset[bytes]:
    """Return the inboxes without a listener, by PUBSUB NUMSUB. If that is not allowed, all count as living."""
    if isinstance(reply, ReplyError):
        return frozenset()
    listening = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return frozenset(inbox for inbox, number in listening if not int(number))


def commit(writes: Sequence[Words]) -> Dialogue:
    """Execute all of ``writes`` and return their replies, or None: a conflict, nothing was executed."""
    commands = [(b"MULTI",), *writes]
    *queued, outcome = yield [*commands, (b"EXEC",)]
    for words, reply in zip(commands, queued, strict=True):
        if isinstance(reply, ReplyError):
            raise WatchRefused(bytes(words[0]), reply)
    (replies,) = checked([outcome])
    return None if replies is None else checked(replies)


def read(keys: WireKeys, words: Words) -> Decide:
    """Read as link/read.lua does."""

    def decide(mute: bool, full: bool) -> Dialogue:
        watching, *found = yield [(b"WATCH", *keys), (b"TIME",), *unpack(blob(words[0]))]
        checked([watching])
        return WritePlan(found, [])

    return decide


def attempt(decide: Decide, inbox: LocalInbox) -> Dialogue:
    """Read, decide, execute; return the reply, or CONFLICT."""
    mute = full = False
    while True:
        plan: WritePlan = yield from decide(mute, full)
        away = [message.inbox != inbox.channel for message in plan.messages]
        published: list[Words] = [(b"PUBLISH", *message) for message in compress(plan.messages, away)]
        try:
            done = yield from commit([*plan.writes, *published])
        except WatchRefused as refused:
            if refused.command == b"PUBLISH" and refused.code == "NOPERM" and not mute:
                mute = True  # the next holder finds out when it looks again
            elif refused.code == "OOM" and plan.without is not None:
                return plan.without
            elif refused.code == "OOM" and not full:
                full = True
            else:
                raise refused.error from None
            continue
        if done is None:
            return CONFLICT
        if plan.more:
            continue
        for message in plan.messages:
            if message.inbox == inbox.channel:
                inbox.deliver(message.payload)
        # A waiter that died after we looked keeps its grant until that expires (P1). To take it back would be another
        # transaction: by then the waiter may have come back, and seen that it holds the lock.
        return plan.reply
