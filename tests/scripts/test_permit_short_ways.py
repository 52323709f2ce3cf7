"""The short ways of the permit scripts do what the long way does, in fewer commands.

Each case is played twice from an empty server, with a clock of the test's own: once with the scripts as they are, once
with scripts in which no waiter is of the usual kind. Compared are the reply, the messages that arrive, and all that is
stored; and it is said which cases are to be short, so that none is by mistake. Random histories show the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
from redis.exceptions import ResponseError

from ..support.inside import WRITER_WEIGHT, ticket_member
from . import permits as tools
from .permits import KEYS, QUEUE, STATE, TTL, Client, commands, everything, inbox

pytestmark = pytest.mark.real

START = 1_800_000_000_000_000
SECOND = 1_000_000
HERE, THERE, DEAD = b"rsa:1", b"rsa:2", b"rsa:0"
SOON = 100_000  # ms that keys have to live, unless what is compared prolongs that
USUAL = "'^rsa:(%x+)|"

Words: TypeAlias = tuple[bytes | int, ...]


@dataclass(frozen=True)
class Actor:
    """A request; by default as a process makes it that is woken by a push."""

    number: int
    inbox: bytes = HERE
    weight: int = 1
    limit: int = 2
    ttl: int = TTL
    identity: bytes | None = None

    @property
    def token(self) -> bytes:
        return b"host:1:%b:%d" % (self.inbox[4:], self.number) if self.identity is None else self.identity

    @property
    def ticket(self) -> bytes:
        return ticket_member(self.inbox, self.number, self.ttl, self.token, self.weight)

    def asks(self, ticket: bytes | None = None, limit: int | None = None) -> Words:
        poll_ms = 0 if self.inbox else 60_000
        limit = self.limit if limit is None else limit
        own = self.ticket if ticket is None else ticket
        return b"permits/acquire", self.token, self.ttl, own, poll_ms, self.weight, limit

    def releases(self, ticket: bytes = b"", pending: int = 0) -> Words:
        return b"permits/release", self.token, ticket, pending


A, B, C, D = map(Actor, range(1, 5))
LATER: Words = (b"later",)
"""Here two seconds pass."""


def set_to(name: bytes, value: int) -> Words:
    return b"raw", b"HSET", STATE, name, value


@dataclass(frozen=True)
class Case:
    """What happened before, and the request that is compared."""

    before: Sequence[Words]
    compared: Words
    short: bool = False
    mute: bool = False
    full: bool = False
    """The server is out of memory."""


def asking(*others: Words, who: Actor = D, first: Actor = C, short: bool = False, **more: Any) -> Case:
    """Two have what there is, one waits, and one more asks."""
    words = more.pop("words", None) or who.asks()
    return Case((A.asks(), B.asks(), first.asks(), *others), words, short, **more)


def releasing(*others: Words, who: Actor = A, first: Actor = C, short: bool = False, **more: Any) -> Case:
    """Two have what there is, one waits, and one of those releases."""
    words = more.pop("words", None) or who.releases()
    return Case((A.asks(), B.asks(), first.asks(), *others), words, short, **more)


def of_three(*actors: Actor, short: bool = False) -> Case:
    """All ask for something of three permits, and the first one releases."""
    actors = tuple(replace(actor, limit=3) for actor in actors)
    return Case([actor.asks() for actor in actors], actors[0].releases(), short)


def of_a_whole(*actors: Actor, short: bool = False) -> Case:
    """All want to read or to write, and the first one releases."""
    actors = tuple(
        replace(actor, limit=WRITER_WEIGHT, weight=WRITER_WEIGHT if actor.weight > 1 else 1) for actor in actors
    )
    return Case([actor.asks() for actor in actors], actors[0].releases(), short)


def heavy(actor: Actor) -> Actor:
    return replace(actor, weight=2)


ELSEWHERE = replace(D, inbox=THERE)
DIES, ITS_NUMBER = replace(C, inbox=DEAD), replace(C, identity=b"host:1:2:3")
SHARES = replace(B, identity=b"host:1:1:2~")
UNDONE = replace(B, number=9)
SHORT = replace(B, number=8, ttl=500)

CASES: dict[str, Case] = {
    # to the end of the queue
    "all is taken": asking(short=True),
    "all is taken, as far as he knows": asking(words=D.asks(limit=0), short=True),
    "two wait": asking(replace(D, number=5).asks(), short=True),
    "he waits, and asks again": asking(D.asks(), short=True),
    "one of another process waits": asking(first=replace(C, inbox=THERE), short=True),
    "one waits who is dead, and nobody has noticed": asking(first=DIES, short=True),
    "the first asks again": asking(words=C.asks()),
    "he does not wait": asking(words=D.asks(b"")),
    "he polls": asking(who=replace(D, inbox=b"")),
    "one is over": Case((SHORT.asks(), B.asks(), C.asks(), LATER), D.asks()),
    "the first has the number of another": asking(first=ITS_NUMBER),
    "the first wants more than there is now": asking(set_to(b"limit", 1), words=D.asks(limit=1), first=heavy(C)),
    "what was undone is over first": Case(
        (UNDONE.releases(pending=1), *(replace(a, ttl=3 * TTL).asks() for a in (A, B, C))), D.asks()
    ),
    "one shares": Case((A.asks(), SHARES.asks(), C.asks()), D.asks()),
    "no memory for him": asking(full=True),
    # from hand to hand
    "one waits": releasing(short=True),
    "one waits behind": releasing(D.asks(), short=True),
    "one waits behind, in another process": releasing(ELSEWHERE.asks(), short=True),
    "one waits behind, and is dead": releasing(replace(D, inbox=DEAD).asks(), short=True),
    "the later one releases": releasing(D.asks(), who=B, short=True),
    "the waiter asks for less time": releasing(D.asks(), first=replace(C, ttl=500), short=True),
    "the waiter asks for more time": releasing(ELSEWHERE.asks(), first=replace(C, ttl=3 * TTL), short=True),
    "the fence is ahead": releasing(set_to(b"fence", START + SECOND), short=True),
    "there is but one": Case([replace(a, limit=1).asks() for a in (A, B, ELSEWHERE)], A.releases(), short=True),
    "there is but one, and none behind": Case([replace(a, limit=1).asks() for a in (A, B)], A.releases(), short=True),
    "two for two": of_three(heavy(A), B, heavy(C), heavy(D), short=True),
    "a writer for a writer": of_a_whole(heavy(A), heavy(B), C, short=True),
    "a writer for a reader": of_a_whole(A, heavy(B), heavy(C), short=True),
    "readers for a writer": of_a_whole(heavy(A), B, C, heavy(D)),
    "the last one that kept two out": of_three(A, B, heavy(C), heavy(D), short=True),
    "he may have asked again": releasing(words=A.releases(pending=1)),
    "he waits, too": releasing(D.asks(), words=A.releases(D.ticket)),
    "another is over": Case((A.asks(), SHORT.asks(), C.asks(), D.asks(), LATER), A.releases()),
    "what was undone is left": Case(
        (B.releases(pending=1), *(replace(a, limit=1).asks() for a in (A, C, D))), A.releases()
    ),
    "nobody may be told": releasing(D.asks(), mute=True),
    "the next polls": releasing(replace(D, inbox=b"").asks()),
    "no memory for a grant": releasing(D.asks(), full=True, short=True),
}  # fmt: skip


class Stage:
    """Plays a case on a server."""

    def __init__(self, redis: Client, muted: Client) -> None:
        self.redis, self.muted = redis, muted
        self.now = START

    async def run(self, words: Words, *, usual: bool, mute: bool = False) -> Any:
        script, *arguments = words
        if script == b"later":
            self.now += 2 * SECOND
        elif script == b"raw":
            await self.redis.execute_command(*arguments)
        else:
            assert isinstance(script, bytes)
            source = tools.load(script.decode()).source.decode().replace("redis.call('TIME')", "TIME")
            assert USUAL in source
            if not usual:
                source = source.replace(USUAL, "'^never:(%x+)|")
            clock = "local micros = table.remove(ARGV)\nlocal TIME = {table.remove(ARGV), micros}\n"
            client = self.muted if mute else self.redis
            return await client.eval(clock + source, 4, *KEYS.all, *arguments, *divmod(self.now, SECOND))
        return None

    async def play(self, case: Case, *, usual: bool) -> tuple[Any, int]:
        """Return what can be seen of it, and how many commands it took."""
        await self.redis.flushall()
        self.now = START
        async with inbox(self.redis, HERE, THERE) as told:
            for number, words in enumerate(case.before):
                self.now += 1000 * number
                await self.run(words, usual=False)
            for key in KEYS.all:
                await self.redis.pexpire(key, SOON)
            await told()
            self.now += 1000
            await self.redis.config_resetstat()
            await self.redis.config_set("maxmemory", int(case.full))
            try:
                reply = await self.run(case.compared, usual=usual, mute=case.mute)
            except ResponseError as error:
                reply = str(error).split()[0]
            finally:
                await self.redis.config_set("maxmemory", 0)
            number = await commands(self.redis)
            kept = [await self.redis.pttl(key) > SOON for key in KEYS.all]
            return (reply, await told(), await everything(self.redis), kept), number


@pytest.mark.parametrize("name", CASES)
async def test_the_short_way_does_what_the_long_way_does(redis: Client, name: str) -> None:
    """P1, P2, P3, P8."""
    case = CASES[name]
    await redis.execute_command("ACL", "SETUSER", "muted", "on", "nopass", "~*", "+@all", "resetchannels")
    where = {name: redis.get_connection_kwargs()[name] for name in ("host", "port")}
    async with type(redis)(**where, username="muted", password="any") as muted:
        await muted.ping()  # what it says first is not counted
        stage = Stage(redis, muted)
        long, many = await stage.play(case, usual=False)
        short, few = await stage.play(case, usual=True)
    assert short == long
    assert (few < many) == case.short, (few, many)


async def test_the_queue_is_kept_while_many_line_up(redis: Client) -> None:
    """One in sixteen sees to it, and a request that is repeated."""
    stage = Stage(redis, redis)
    async with inbox(redis, HERE):
        for actor in (A, B, C):
            await stage.run(actor.asks(), usual=False)
        kept = []
        for number in range(4, 24):
            await redis.pexpire(QUEUE, SOON)
            await stage.run(replace(D, number=number).asks(), usual=True)
            kept.append(await redis.pttl(QUEUE) > SOON)
        assert kept.count(True) == 1
        await redis.pexpire(QUEUE, SOON)
        await stage.run(replace(D, number=23).asks(), usual=True)
        assert await redis.pttl(QUEUE) > SOON
