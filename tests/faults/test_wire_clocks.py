"""P1, P5, P6, FAULTS D13: a grant is pushed by a server whose clock was set ahead since the waiter asked.

The time of such a grant is in our future, so nothing says how long it was in flight; and that may have been long.
(With a real server and a clock that is really set: test_clocks.py, which needs libfaketime.)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from redis_sync_aio import wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, Passage, Rule, anything
from redis_sync_aio.types import BaseLease

from ..support.primitives import KINDS, SHARED, Primitive
from ..support.wired import ACQUIRE, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

LATE = 0.2
TTL = 5.0
AHEAD = 15_000_000
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
all_kinds = pytest.mark.parametrize("kind", [*KINDS, *SHARED], ids=str)
identities = pytest.mark.parametrize("identity", [None, "me"])
actions = pytest.mark.parametrize(
    "action", [Action.PASS, Action.CUT_AFTER, Action.delay_reply(0.1)], ids=["heard", "cut", "late"]
)


def _ahead(push: bytes) -> bytes:
    said = re.search(rb"\n\d+ -?\d+ (\d{16}) ", push)
    assert said is not None
    return push[: said.start(1)] + b"%d" % (int(said[1]) + AHEAD) + push[said.end(1) :]


async def _late_and_ahead(it: Passage) -> None:
    await asyncio.sleep(LATE)
    await it.rewrite(_ahead)


@dataclass
class Handed:
    """What is in flight to a waiter: the push, and then its question."""

    w: Wired
    waiting: asyncio.Task[BaseLease]
    push: Rule
    question: Rule


@asynccontextmanager
async def handed(
    server: EmbeddedServer, kind: Primitive, action: Action, identity: str | None = None
) -> AsyncIterator[Handed]:
    """It is held by somebody else, and released to us."""
    async with wired(server, kind=kind, claim=TTL) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock(ttl=TTL).acquire(identity=identity))
        await w.queued()
        push = w.proxy.on_push(anything, Action(request=_late_and_ahead))
        question = w.proxy.on(ACQUIRE, action)
        await holder.release()
        yield Handed(w, waiting, push, question)
        await w.check_free(holder.fence)


@all_kinds
@actions
async def test_p6_the_server_says_how_long_it_lasts(server: EmbeddedServer, kind: Primitive, action: Action) -> None:
    async with handed(server, kind, action) as it:
        lease = await it.waiting
        assert it.push.fired.is_set()
        assert it.question.hits >= 1
        before = lease.remaining()
        assert before <= (await kind.left_ms(it.w.direct, it.w.name) + 1) / 1000 + LATE / 2
        assert TTL - 2 < before <= TTL - LATE / 2
        await it.w.check_held(lease)
        await lease.release()


@kinds
@actions
async def test_p6_so_for_an_identity(server: EmbeddedServer, kind: Primitive, action: Action) -> None:
    async with handed(server, kind, action, "me") as it:
        lease = await it.waiting
        assert TTL - 2 < lease.remaining() <= TTL - LATE / 2
        await it.w.check_held(lease)
        await lease.release()


@kinds
@identities
async def test_p5_cancelled_while_it_asks(server: EmbeddedServer, kind: Primitive, identity: str | None) -> None:
    """The grant was new, so it is given back; also that of an identity, though the answer speaks of what it has."""
    async with handed(server, kind, Action.HOLD_REPLY, identity) as it:
        await it.question.fired.wait()
        it.waiting.cancel()
        await asyncio.wait([it.waiting])
        assert it.waiting.cancelled()
        it.question.release.set()

        async def free() -> bool:
            return not await kind.held(it.w.direct, it.w.name)

        await wait_until(free, SOON, timeout=TTL / 2)
