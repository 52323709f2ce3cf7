"""The mark of a job: a text next to a lock, which outlasts it and says what became of the work under it.

Any client may read a mark; only the holder of the lock may change it, by the server's word. Each change is one script
over the connection that carries the lock. So the release that follows on that connection cannot overtake it, and a
change that a cancelled task has sent is finished in the background, as a release is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from .._client.replies import Argument
from .._client.settings import Client
from .._core.cancellation import outcome_of, undo_in
from .._core.display import text
from .._core.futures import finish
from .._core.keys import FENCE, FORGOTTEN, FORGOTTEN_MS, Keys, mark_keys, said_by
from .._engine.commands import Commands
from .._leases.grant import Grant
from .._leases.hold import is_by_loss
from .._leases.hub import Hub
from .._leases.implicit import CoordinatorLike, hub_of
from .._leases.lease import Lease, grant_of
from .._leases.manager import GrantManager
from .._leases.settings import HELD, LeaseState
from .._scripts.constants import Renewed
from .._transport.call import Call
from ..errors import OutcomeUnknown, SyncError, Unreachable, WrongKeyType


class JobMark:
    """The mark of one lock, whose texts last ``ms``."""

    def __init__(self, source: Client | CoordinatorLike, keys: Keys, ms: int) -> None:
        self._source = source
        self._keys = mark_keys(keys)
        self._ms = ms

    @property
    def key(self) -> str:
        """The key of the mark, as text."""
        return text(self._keys.mark)

    @property
    def id(self) -> bytes:
        """The identifier of the mark in this process."""
        return self._keys.id

    def hub(self) -> Hub:
        """Return the hub of its lock; raises WrongContext and CoordinatorClosed."""
        return hub_of(self._source)

    async def read(self) -> bytes | None:
        """Return the text of the mark; None if there is none. One round trip, without the lock."""
        reply = await self.hub().ask(lambda commands, call: commands.mark(self._keys, (b"",), call))
        found: bytes | None = reply[1]
        return found

    async def read_under(self, lease: Lease) -> bytes | None:
        """Return the text of the mark. Raises LeaseLost unless ``lease`` holds at that moment."""
        return await self._ask(lease)

    async def begin(self, lease: Lease, new: Mapping[str, Any], replaced: bytes | None = None) -> bytes | None:
        """Write ``new`` if the mark is ``replaced``, or counts as none, and return None; else return its text.

        After an error and on cancellation, the mark is as if this had not been called.
        """
        written = self.text_of(lease, new)
        try:
            while True:
                found = await self._ask(lease, written, self._ms, replaced or b"")
                if found in (replaced, written):  # ``written``: by a copy whose answer was lost
                    return None
                if found is not None and self.parsed(found) is not None:
                    return found
                replaced = found
        except BaseException:  # the change may be in flight
            self.forget(lease, new)
            raise

    async def write(self, lease: Lease, new: Mapping[str, Any], since: float = 0.0) -> bytes:
        """Write ``new`` and return its text; ``since``: seconds of its time that have passed.

        On cancellation the writing is finished in the background.
        """
        written = self.text_of(lease, new)
        await self._ask(lease, written, max(1, self._ms - int(since * 1000)))
        return written

    def forget(
        self, lease: Lease, written: Mapping[str, Any], failed: Callable[[SyncError], None] | None = None
    ) -> None:
        """Let the mark count as none if it is still ``written``; do not wait for the answer.

        ``failed`` gets the error, before the release that follows is answered.
        """
        grant, new = grant_of(lease), self.text_of(lease, {FORGOTTEN: True})
        words = new, FORGOTTEN_MS, self.text_of(lease, written)

        def answered(call: Call) -> None:
            _, error = self._outcome(grant, call, new)
            if error is not None and failed is not None:
                failed(error)

        def send() -> None:
            if grant.state is HELD:
                self._send(grant, words, answered)

        undo_in(grant.manager.loop, send)

    def parsed(self, found: bytes) -> dict[str, Any] | None:
        """Return the content of a mark, None if it counts as none. Raises WrongKeyType for a foreign text."""
        said = said_by(found)
        if said is None or not isinstance(said.get(FENCE), int):
            raise self.foreign(f"it says {text(found)[:100]!r}")
        return None if FORGOTTEN in said else said

    def foreign(self, problem: str, by: str = "redis_sync_aio") -> WrongKeyType:
        """Return the error for a mark that was not written ``by`` the function that should have written it."""
        return WrongKeyType.not_ours(text(self._keys.name), what="the mark", key=self.key, problem=problem, by=by)

    @staticmethod
    def text_of(lease: Lease, says: Mapping[str, Any]) -> bytes:
        """Return the text of a mark of the run under ``lease``."""
        return json.dumps({**says, FENCE: lease.fence}).encode()

    def _send(self, grant: Grant, words: tuple[Argument, ...], answered: Callable[[Call], None]) -> Call:
        manager = grant.manager
        assert isinstance(manager, GrantManager)  # of a plain lock

        def send(commands: Commands, call: Call) -> None:
            commands.mark(self._keys, (grant.wire_token, *words), call)

        return manager.send(grant, send, answered)

    async def _ask(self, lease: Lease, *words: Argument) -> bytes | None:
        """Read or change the mark, and return the text found. It is repeated within ``retry_for``, as it does no harm.

        While the lease holds no other process writes the mark, and after that a change has no effect, however late it
        arrives.
        """
        grant, new = grant_of(lease), words[0] if words else None
        grant.check_context()
        grant.check()
        outcome: asyncio.Future[bytes | None] = grant.manager.loop.create_future()

        def answered(call: Call) -> None:
            finish(outcome, *self._outcome(grant, call, new))

        call = self._send(grant, words, answered)
        try:
            return await outcome_of(outcome)
        except asyncio.CancelledError as error:
            if new is not None and call.ambiguous and not call.over and grant.reason is not None and is_by_loss(error):
                raise self._unknown() from grant.loss()  # LeaseLost would say that nothing was written
            raise

    def _outcome(self, grant: Grant, call: Call, new: Argument | None) -> tuple[bytes | None, SyncError | None]:
        """Return the text found, or the error, by the answer to a command that writes ``new`` (None: only reads)."""
        lost = grant.lost_as() if grant.state is LeaseState.LOST else None
        if call.error is not None:
            if new is None or not call.attempts or not (call.ambiguous or isinstance(call.error, Unreachable)):
                return None, lost or call.error
            unknown = self._unknown()
            unknown.__cause__ = lost or call.error
            return None, unknown
        code, found = call.reply
        if code == Renewed.RENEWED:
            return found, None
        grant.lose("expired" if code == Renewed.GONE else "taken")
        return None, grant.lost_as()

    def _unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(attempts=1, keys=(self.key,), lease=text(self._keys.name), mark=True)
