"""RESP2 and RESP3, as far as a man in the middle needs them: where a message ends, and what answers what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Generic, TypeAlias, TypeVar

from .._core.display import shown

_CRLF = b"\r\n"
_LINES = frozenset("+-:_#,(")
_BULKS = frozenset("$=!")
# Elements that follow an aggregate, for each one it counts. What an attribute describes comes after these.
_AGGREGATES = {"*": 1, "~": 1, ">": 1, "%": 2, "|": 2}

END = "end"
"""The kind of the frame that stands for the end of a stream; it has the bytes of the unfinished frame."""

_MESSAGES = frozenset({b"message", b"pmessage", b"smessage"})
# What confirms a (un)subscription, and the family of channels it belongs to.
_CONFIRMATIONS = {family + verb: family for family in (b"", b"p", b"s") for verb in (b"subscribe", b"unsubscribe")}


class ProtocolError(ValueError):
    """The bytes are not RESP."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole message: a command, a reply or a push."""

    raw: bytes
    """The bytes as they came."""
    kind: str
    """The character that tells its type: ``*``, ``$``, ``>`` …"""
    items: list[bytes] = field(default_factory=list)
    """The payload of every leaf, flattened: a command's arguments, a push's kind, channel and message."""


class Splitter:
    """Cuts a stream of bytes into frames, however it was fragmented."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._begin()

    def _begin(self) -> None:
        self._at = 0  # where the next element begins
        self._missing = 1  # elements still to come before the frame is whole
        self._kind = "|"
        self._items: list[bytes] = []

    def feed(self, data: bytes) -> list[Frame]:
        """Take more bytes in; return the frames that are whole now."""
        self._data += data
        frames: list[Frame] = []
        while self._element():
            if self._missing == 0:
                frames.append(Frame(self._cut(), self._kind, self._items))
                self._begin()
        return frames

    def rest(self) -> bytes:
        """Take out the bytes of the frame that is not whole yet."""
        self._at = len(self._data)
        rest = self._cut()
        self._begin()
        return rest

    def _cut(self) -> bytes:
        raw = bytes(self._data[: self._at])
        del self._data[: self._at]
        return raw

    def _element(self) -> bool:
        """Step over the next element, if all of it is there."""
        end = self._data.find(_CRLF, self._at)
        if end < 0:
            return False
        kind, line = chr(self._data[self._at]), bytes(self._data[self._at + 1 : end])
        after = end + len(_CRLF)
        if self._kind == "|" and self._missing == 1:
            self._kind = kind
        if kind in _LINES:
            self._leaf(line, after)
        elif kind in _AGGREGATES:
            self._missing += _AGGREGATES[kind] * max(0, _length(line)) - (kind != "|")
            self._at = after
        elif kind in _BULKS:
            return self._bulk(_length(line), after)
        else:
            raise ProtocolError(f"not RESP: {bytes(self._data[self._at : end])[:40]!r}")
        return True

    def _bulk(self, length: int, start: int) -> bool:
        if length < 0:
            self._leaf(b"", start)
            return True
        end = start + length
        if len(self._data) < end + len(_CRLF):
            return False
        if self._data[end : end + len(_CRLF)] != _CRLF:
            raise ProtocolError("a bulk string is longer than it says")
        self._leaf(bytes(self._data[start:end]), end + len(_CRLF))
        return True

    def _leaf(self, payload: bytes, after: int) -> None:
        self._items.append(payload)
        self._missing -= 1
        self._at = after


def _length(line: bytes) -> int:
    try:
        return int(line)
    except ValueError:
        raise ProtocolError(f"not a length: {line[:40]!r}") from None


Predicate: TypeAlias = Callable[[list[bytes]], bool]
"""A function that takes the arguments of a command, or the payload of a push, and returns whether a rule is for it."""


def as_bytes(text: bytes | str | int) -> bytes:
    """Return an argument as it is sent."""
    return text if isinstance(text, bytes) else str(text).encode()


def encode(*args: bytes | str | int) -> bytes:
    """Write a command."""
    parts = [as_bytes(arg) for arg in args]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _part(text: str | bytes, what: str) -> bytes:
    """Return text of a command as it is sent; raise TypeError for anything else, ValueError for nothing."""
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"{what} must be str or bytes, not {shown(text)}")
    if not text:
        raise ValueError(f"{what} must not be empty: every command has it")
    return as_bytes(text)


def command(name: str | bytes) -> Predicate:
    """Return a predicate: commands of this name, in any case; ``"CLIENT ID"`` names a subcommand."""
    words = _part(name, "name").upper().split()
    return lambda args: [word.upper() for word in args[: len(words)]] == words


def arg(part: str | bytes) -> Predicate:
    """Return a predicate: commands with these bytes in an argument; pushes with these bytes in their payload."""
    wanted = _part(part, "part")
    return lambda args: any(wanted in one for one in args)


def script(sha: str | bytes) -> Predicate:
    """Return a predicate: calls of the script with this SHA1, by EVALSHA or EVAL."""
    digest = _part(sha, "sha").lower()

    def calls(args: list[bytes]) -> bool:
        name, body = args[0].upper().removesuffix(b"_RO"), b"".join(args[1:2])
        called = sha1(body).hexdigest().encode() if name == b"EVAL" else body.lower()
        return name in (b"EVAL", b"EVALSHA") and called == digest

    return calls


def anything(_: list[bytes]) -> bool:
    """Return True: for every command, also of the client's handshake, and every push."""
    return True


T = TypeVar("T")


@dataclass(slots=True)
class _Question(Generic[T]):
    tag: T
    args: list[bytes]
    answer: Frame | None
    parts: list[Frame] = field(default_factory=list)
    wanted: int = 0  # confirmations; not known before the first one is there

    @property
    def verb(self) -> bytes:
        return self.args[0].lower() if self.args else b""


class Dialogue(Generic[T]):
    """Finds the command that a frame from the server answers, and tells pushes from answers.

    Not understood: CLIENT REPLY and MONITOR.
    """

    def __init__(self) -> None:
        self._questions: deque[_Question[T]] = deque()
        self._channels: dict[bytes, set[bytes]] = {family: set() for family in _CONFIRMATIONS.values()}
        self._resp3 = False
        self._subscriber = False

    def ask(self, tag: T, args: list[bytes], answer: Frame | None = None) -> None:
        """Note a command that goes up. With ``answer`` it does not: `ready` returns that when its turn comes."""
        question = _Question(tag, args, answer)
        self._questions.append(question)
        if answer is None:
            self._resp3 |= question.verb == b"hello" and args[1:2] == [b"3"]
            self._subscriber |= question.verb in _CONFIRMATIONS

    def is_push(self, frame: Frame) -> bool:
        """Return whether a frame from the server was not asked for."""
        if frame.kind == ">":
            return not self._confirms(frame)
        resp2_subscriber = self._subscriber and not self._resp3
        return resp2_subscriber and frame.kind == "*" and bool(frame.items) and frame.items[0] in _MESSAGES

    def take(self, frame: Frame) -> tuple[T | None, Frame] | None:
        """Return the command that is answered (None: none was asked) and its whole reply; None: more of it follows."""
        if not self._questions:
            return None, frame
        question = self._questions[0]
        if self._confirms(frame) and self._incomplete(question, frame):
            return None
        self._questions.popleft()
        raw = b"".join(part.raw for part in question.parts)
        return question.tag, Frame(raw, frame.kind, frame.items) if raw else frame

    def ready(self) -> tuple[T, Frame] | None:
        """Return the next command and its answer, if the answer does not come from the server."""
        if not self._questions or self._questions[0].answer is None:
            return None
        question = self._questions.popleft()
        assert question.answer is not None
        return question.tag, question.answer

    def _confirms(self, frame: Frame) -> bool:
        verb = frame.items[0] if frame.items and frame.kind in (">", "*") else b""
        return verb in _CONFIRMATIONS and bool(self._questions) and self._questions[0].verb == verb

    def _incomplete(self, question: _Question[T], frame: Frame) -> bool:
        """Collect a confirmation: there is one for each channel (for each one known, if none was named)."""
        channels = self._channels[_CONFIRMATIONS[question.verb]]
        question.wanted = question.wanted or len(question.args) - 1 or len(channels) or 1
        question.parts.append(frame)
        if question.verb.endswith(b"unsubscribe"):
            channels.discard(frame.items[1])
        else:
            channels.add(frame.items[1])
        return len(question.parts) < question.wanted
