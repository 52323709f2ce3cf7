"""The decisions of the scripts, executed with WATCH, MULTI and EXEC: for servers and users without scripts.

Locks and semaphores work that way; everything else needs scripts, and says so.

A *dialogue* is the conversation with the server for one call, as a generator without input or output of its own. It
yields commands that leave in one write, receives their replies, and returns what the script would have replied. No
other dialogue may begin on the same connection meanwhile, since EXEC ends every WATCH.

    1. WATCH all keys of the name, TIME, and read.
    2. Read more if need be: what the waiters hold, and which of their inboxes have a listener.
    3. Decide, by the pure rules (`lock_rules`, `permit_rules`).
    4. MULTI, what the decision changed, PUBLISH, EXEC. If a key has changed since 1, the dialogue ends in CONFLICT and
       begins again. When there is nothing to write, an empty MULTI and EXEC prove that what was read was true.

**Time.** A decision is as old as its TIME, and its process may be stopped before EXEC. That does no harm. As long as no
key has changed, no other decision was made. A ttl counts from EXEC on, the end of a permit from TIME on, and the client
counts a grant from before the WATCH.

**Replay.** The decisions are idempotent for a token, as those of the scripts. So a dialogue whose EXEC was not answered
begins again.

**Messages to ourselves** are not published but delivered when EXEC has succeeded: before Redis 7.2 what a connection
publishes to itself in a transaction arrives in the middle of the reply to EXEC, which cannot be read then.

**Differences from the scripts.** A waiter that dies after 2 keeps what EXEC has granted it until that ends by itself
(its claim, or its ttl). To take it back would need another transaction, and by then the waiter may be back and use it.
When the server is out of memory, it refuses commands that a script may still run. Nothing is handed over then: a lock
is free, and its first waiter is notified to look again. Permits can neither be renewed nor released.
"""

from __future__ import annotations

from collections.abc import Callable

from .._client.replies import ReplyError, Words
from .._transport.call import Call
from .._transport.dialogues import NOWHERE, Dialogue, LocalInbox
from . import watch_lock as lock
from . import watch_permits as permits
from .watch_dialogue import Decide, attempt, read

DECISIONS: dict[str, Callable[[tuple[bytes, ...], Words], Decide]] = {
    "link/read": read,
    "lock/acquire": lock.acquire,
    "lock/acquire_all": lock.acquire_all,
    "lock/release": lock.release,
    "lock/renew": lock.renew,
    "lock/force_release": lock.force,
    "lock/mark": lock.mark,
    "permits/acquire": permits.acquire,
    "permits/release": permits.release,
    "permits/renew": permits.renew,
    "permits/resize": permits.resize,
}
"""By the name of the script that decides the same."""


def converse(call: Call, inbox: LocalInbox = NOWHERE) -> Dialogue:
    """Return one attempt at ``call``: it ends with the reply, with CONFLICT, or with the server's error."""
    keys, script, what = call.keys, call.script.name, ""
    if not keys.kind.watch and script != "link/read":  # anything may be looked at
        what = keys.kind.title
    decide = DECISIONS.get(script)
    if decide is None or what:
        return _refuse(what or script.rpartition("/")[2] + "()")
    return attempt(decide(keys.all, call.arguments), inbox)


def _refuse(what: str) -> Dialogue:
    """Refuse a call that works by scripts only, as a server refuses a command."""
    yield from ()
    raise ReplyError(
        f"NOPERM {what} needs scripts, and only locks and semaphores work without: allow this user EVAL and EVALSHA"
    )
