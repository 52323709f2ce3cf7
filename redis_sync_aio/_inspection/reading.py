"""One name: what is asked about it, in two rounds, and what the replies mean.

The first round is for every name that a search finds, so it is short. The second one is only for those that somebody
holds or waits for. Nothing makes the commands of a name one step: what they tell may be of moments that follow each
other closely.
"""

from __future__ import annotations

from typing import Protocol

from .._client.error_replies import error_code
from .._client.resp import Reply, ReplyError, Words
from .._core.display import text
from .._core.keys import NEVER_HELD, Keys, LockKeys, PermitKeys, PermitKind, SlotState, mark_key, record_key
from .._core.marks import BEGINNING, is_done, is_forgotten, said_by
from .._engine.watch_dialogue import pairs
from .._engine.watch_permits import permits_of, state_numbers
from .._scripts.constants import WRITER_WEIGHT
from . import problems
from .parties import Listening, Queued, absent, channels, holder, queued, waiter
from .server import Replies, Server
from .views import HolderView, Kind, MarkView, NameView, Problem, WaiterView

TOMBSTONES = 16
"""Number of permits that are read beyond those shown: undone requests may be among them."""


HOLDERS, LEFT, FENCE, STATE = "who holds it", "the time left of its lease", "its fence", "its limit and fences"
QUEUE, ALIVE, MARK = "its queue", "which of its waiters are alive", "the mark of its job"
"""The facts that a server may refuse to show, in words."""

KINDS: dict[PermitKind, Kind] = {
    "sem": "semaphore",
    "rw": "read_write",
    "event": "event",
    "latch": "latch",
    "barrier": "barrier",
}


class Reading(Protocol):
    """The replies about one name."""

    @property
    def moved(self) -> ReplyError | None:
        """The reply that another shard has the name, if there was one."""
        ...

    @property
    def known(self) -> bool:
        """Whether the server has anything of it."""
        ...

    def first_asked(self, now: int) -> list[Words]:
        """Return the commands of the first round. ``now``: server time in microseconds, or a little earlier."""
        ...

    def first(self, replies: Replies) -> bool:
        """Take the replies; return whether there is anything to tell."""
        ...

    def then_asked(self) -> list[Words]:
        """Return the commands of the second round."""
        ...

    def channels(self) -> set[bytes]:
        """Return what all processes in it listen to if they are connected."""
        ...

    def absent(self, listening: Listening) -> set[bytes]:
        """Return the presences of the processes that hold it and are not connected to this server."""
        ...

    def view(self, replies: Replies, server: Server, listening: Listening) -> NameView:
        """Take the replies of the second round, and return the view."""
        ...


def reading_of(keys: Keys, shown: int) -> Reading:
    """Return what reads one name, with the first ``shown`` holders and waiters."""
    if isinstance(keys, PermitKeys):
        return PermitReading(keys, shown)
    assert isinstance(keys, LockKeys)
    return LockReading(keys, shown)


class _Reading:
    """The common part of locks and permits: the queue, and errors."""

    kind: Kind
    of_lock = False
    _queue_at = 1
    _found = False
    """Whether there is a holder."""
    _fence: int | None = None
    moved: ReplyError | None = None
    """See `Reading`."""

    def __init__(self, keys: Keys, shown: int) -> None:
        self.name = keys.name
        self._keys = keys
        self._queue, self._polls = keys.all[self._queue_at], keys.all[3]
        self.shown = shown
        self.tickets: list[Queued] = []
        self.problems: list[Problem] = []
        self._wrong: list[bytes] = []
        self._refused: dict[str, str] = {}  # what the server refused to show, and its answer
        self._all_queued = True

    @property
    def known(self) -> bool:
        """See `Reading`."""
        return self._active or self._fence is not None

    @property
    def _active(self) -> bool:
        return bool(self._found or self.tickets or self.problems or self._wrong or self._refused)

    def _usable(self, reply: Reply, key: bytes, what: str, otherwise: Reply = None) -> Reply:
        """Return the reply, or ``otherwise`` in place of an error, which is noted. ``what``: the facts in it."""
        if not isinstance(reply, ReplyError):
            return reply
        code = error_code(str(reply))
        if code == "WRONGTYPE":
            if key not in self._wrong:
                self._wrong.append(key)
        elif code == "MOVED":
            self.moved = reply
        elif code not in ("ASK", "TRYAGAIN"):  # these two: another shard tells
            self._refused.setdefault(what, str(reply))
        return otherwise

    def _readable(self, key: bytes, *facts: str) -> bool:
        """Return whether these facts, which are in ``key``, are known. What is not readable is not missing."""
        return key not in self._wrong and not any(fact in self._refused for fact in facts)

    def _tokens(self) -> set[bytes]:
        """Return the tokens of the holders."""
        raise NotImplementedError

    def channels(self) -> set[bytes]:
        """See `Reading`."""
        return channels(self._tokens(), self.tickets)

    def absent(self, listening: Listening) -> set[bytes]:
        """See `Reading`."""
        return absent(self._tokens(), listening)

    def _queue_asked(self) -> Words:
        return (b"ZRANGE", self._queue, 0, self.shown - 1, b"WITHSCORES")

    def _take_queue(self, reply: Reply) -> None:
        found = pairs(self._usable(reply, self._queue, QUEUE, []))
        self.tickets = queued(found, self.of_lock)
        self._all_queued = len(found) < self.shown

    def _polled(self) -> list[Queued]:
        return [one for one in self.tickets if not one.ticket.inbox]

    def _about_queue(self) -> list[Words]:
        polled: list[Words] = [(b"ZSCORE", self._polls, one.member) for one in self._polled()]
        return [(b"ZCARD", self._queue), *polled]

    def _waiters(
        self, replies: Replies, now: int, permits: int, listening: Listening, holders: set[bytes]
    ) -> tuple[list[WaiterView], int]:
        """Return the waiters, and how many there are. ``holders`` were granted something between the reads."""
        waiting = self._usable(replies[0], self._queue, QUEUE, 0)
        scores = [self._usable(reply, self._polls, ALIVE) for reply in replies[1:]]
        until = dict(zip([one.member for one in self._polled()], scores, strict=True))
        polls_known = self._readable(self._polls, ALIVE)
        rest = [one for one in self.tickets if one.ticket.token not in holders]
        found = [waiter(one, now, permits, until.get(one.member), listening, polls_known) for one in rest]
        if dead := [it for it in found if it.alive is False]:
            self.problems.append(problems.dead_waiters(dead))
        if self._all_queued:  # the number is from the second read, when others may have come or gone
            return found, len(found)
        return found, max(len(found), waiting - (len(self.tickets) - len(rest)))

    def _judge_keys(self, fence: int | None, now: int) -> None:
        if self._refused:
            self.problems.append(problems.unreadable(self._refused))
        if self._wrong:
            self.problems.append(problems.wrong_type(self._wrong))
        if fence is not None and fence - now > problems.CLOCK:
            self.problems.append(problems.clock_behind((fence - now) / 1e6))


class LockReading(_Reading):
    """A lock, as its keys tell."""

    of_lock = True
    kind = "lock"

    def __init__(self, keys: LockKeys, shown: int) -> None:
        super().__init__(keys, shown)
        self._fence_key = keys.fence
        self._key, self._record, self._mark = keys.all[0], record_key(keys), mark_key(keys)
        self._mark_left = -2
        self._holder: bytes | None = None
        self._left = -2
        self._granted = b""

    def first_asked(self, now: int) -> list[Words]:
        """See `Reading`."""
        about = [(b"GET", self._key), (b"PTTL", self._key), (b"GET", self._fence_key), (b"PTTL", self._mark)]
        return [*about, self._queue_asked()]

    def first(self, replies: Replies) -> bool:
        """See `Reading`."""
        held, left, last, mark_left, queue = replies
        self._mark_left = -2 if isinstance(mark_left, ReplyError) else mark_left
        self._holder = self._usable(held, self._key, HOLDERS)
        self._left = self._usable(left, self._key, LEFT, -2)
        if (last := self._usable(last, self._fence_key, FENCE)) is not None:
            if last[:16].isdigit() and last[16:17] == b" ":
                self._fence, self._granted = int(last[:16]), last[17:]
            else:
                self._wrong.append(self._fence_key)
        self._take_queue(queue)
        self._found = self._holder is not None
        return self._active

    def _tokens(self) -> set[bytes]:
        return set() if self._holder is None else {self._holder}

    def then_asked(self) -> list[Words]:
        """See `Reading`."""
        mark: list[Words] = [(b"GETRANGE", self._mark, 0, BEGINNING - 1)] if self._mark_left != -2 else []
        return [(b"HGET", self._record, b"fence"), *mark, *self._about_queue()]

    @property
    def known(self) -> bool:
        """See `Reading`."""
        return super().known or self._mark_left != -2

    def _mark_view(self, reply: Reply) -> MarkView | None:
        """Return the view of the mark; None if it has gone since the first round."""
        state: SlotState | None = None
        if not (isinstance(reply, ReplyError) and error_code(str(reply)) == "NOPERM"):  # an optional right
            found = self._usable(reply, self._mark, MARK)
            if found is not None and (found == b"" or is_forgotten(found)):
                return None
            said = None if found is None else said_by(found)
            if found is not None and (len(found) == BEGINNING or (said is not None and is_done(said))):
                state = "done"
            elif said is not None:
                state = "running" if self._holder is not None else "failed"
        return MarkView(state, None if self._mark_left == -1 else self._mark_left / 1000)

    def view(self, replies: Replies, server: Server, listening: Listening) -> NameView:
        """See `Reading`."""
        now = server.time
        robust, mark = isinstance(replies[0], bytes), None
        if self._mark_left != -2:
            mark, replies = self._mark_view(replies[1]), [replies[0], *replies[2:]]
        holders = () if self._holder is None else (self._holder_view(self._holder, now, listening),)
        waiters, waiting = self._waiters(replies[1:], now, 0, listening, self._tokens())
        if holders and self._holder is not None:
            self._judge_holder(holders[0], self._holder)
        known = self._readable(self._key, HOLDERS)
        if known and not holders and any(it.alive is not False for it in waiters):
            self.problems.append(problems.queue_without_holder(waiters[0].polls))
        self._judge_keys(self._fence, now)
        held = len(holders)
        return NameView(
            text(self.name),
            "robust" if robust else self.kind,
            server.address,
            holders,
            tuple(waiters),
            held,
            waiting,
            1,
            1 - held if known else None,
            self._fence,
            tuple(self.problems),
            mark,
        )

    def _holder_view(self, token: bytes, now: int, listening: Listening) -> HolderView:
        ours = token == self._granted != b""
        fence = self._fence if ours else None
        endless = self._left == -1 or not self._readable(self._key, LEFT)
        left = None if endless else max(0, self._left) / 1000  # -2: it has just expired
        foreign = not ours and self._readable(self._fence_key, FENCE)
        return holder(token, now, fence, left, foreign=foreign, listening=listening)

    def _judge_holder(self, one: HolderView, token: bytes) -> None:
        if one.foreign and one.host is not None:
            self.problems.append(problems.fence_lost())
        elif one.foreign and self._left == -1:
            self.problems.append(problems.foreign_without_ttl(self._key, token))
        if self._left == -1 and one.connected is False:
            self.problems.append(problems.holder_disconnected(self._key, token, one))


class PermitReading(_Reading):
    """A semaphore, or something else that consists of permits, as its keys tell."""

    _queue_at = 2

    def __init__(self, keys: PermitKeys, shown: int) -> None:
        super().__init__(keys, shown)
        self._permits, self._state = keys.all[:2]
        self.kind = KINDS[keys.kind]
        self._gate = self.kind in NEVER_HELD
        self._limit = self._used = 0
        self._all_shown = True
        self._live: list[tuple[bytes, float]] = []  # the first ones, and until when

    def first_asked(self, now: int) -> list[Words]:
        """See `Reading`."""
        return [
            (b"HMGET", self._state, b"limit", b"used", b"fence"),
            (b"ZCARD", self._permits),
            (
                b"ZRANGEBYSCORE",
                self._permits,
                b"(%d" % now,
                b"+inf",
                b"WITHSCORES",
                b"LIMIT",
                0,
                self.shown + TOMBSTONES,
            ),
            self._queue_asked(),
        ]

    def first(self, replies: Replies) -> bool:
        """See `Reading`."""
        known, number, permits, queue = replies
        known = self._usable(known, self._state, STATE, [None] * 3)
        try:
            self._limit, self._used, fence = state_numbers(self._state, known)
        except ReplyError as foreign:  # data of another program, in a hash
            fence = self._usable(foreign, self._state, STATE, 0)
        self._fence, used = fence or None, known[1]
        live = [one for one in pairs(self._usable(permits, self._permits, HOLDERS, [])) if one[1].is_integer()]
        self._all_shown, self._live = len(live) <= self.shown, live[: self.shown]
        number = self._usable(number, self._permits, HOLDERS, 0)
        permits_gone = self._used and not number and self._readable(self._permits, HOLDERS)
        if permits_gone or (live and used is None and self._readable(self._state, STATE)):
            self.problems.append(problems.permits_lost())
        if self.kind == "barrier" and self._limit > 0:
            self.problems.append(problems.broken())
        self._take_queue(queue)
        self._found = bool(self._live)
        return self._active

    def _tokens(self) -> set[bytes]:
        return {token for token, _ in self._live}

    def then_asked(self) -> list[Words]:
        """See `Reading`."""
        fields = [b"=" + token for token, _ in self._live] or [b"="]
        return [(b"HMGET", self._state, *fields), *self._about_queue()]

    def view(self, replies: Replies, server: Server, listening: Listening) -> NameView:
        """See `Reading`."""
        now = server.time
        about = self._usable(replies[0], self._state, STATE, [None] * len(self._live))
        holders, weights = list[HolderView](), 0
        for (token, until), found in zip(self._live, about, strict=False):
            if found is None and not self.problems and self._readable(self._state, STATE):
                continue  # released between the two reads
            of_it = permits_of([token], [found], [until])
            weight, fence = (of_it[token].weight, of_it[token].fence) if of_it else (1, 0)
            weights += weight
            it = holder(
                token, now, fence or None, (until - now) / 1e6, listening=listening, weight=weight, permits=self._limit
            )
            holders.append(it)
        shared = self._limit == WRITER_WEIGHT
        waiters, waiting = self._waiters(replies[1:], now, self._limit, listening, self._tokens())
        held = weights if self._all_shown else self._used  # which also counts those that have ended unnoticed
        if held >= WRITER_WEIGHT:
            held = 1
        known = self._readable(self._permits, HOLDERS)
        if known and not (holders or self._gate) and any(it.alive is not False for it in waiters):
            self.problems.append(problems.queue_without_holder(waiters[0].polls))
        if not (shared or self._gate) and held > self._limit > 0:
            self.problems.append(problems.over_limit(held, self._limit))
        self._judge_keys(self._fence, now)
        limit = None if shared or self._gate else self._limit or None
        return NameView(
            text(self.name),
            self.kind,
            server.address,
            tuple(holders),
            tuple(waiters),
            held,
            waiting,
            limit,
            None if limit is None or not known else max(0, limit - held),
            self._fence,
            tuple(self.problems),
        )
