"""Leases that a ``release()`` without a name chooses from, and leases on their way to another process.

The text carries the token that holds the lease at the server. To attach it is to replace that token by a new one, in
one step there: so it cannot be attached a second time, and nothing that the first process may still send has an effect.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from .._core.clock import now
from .._core.keys import Keys, PermitKeys
from .._scripts.constants import WRITER_WEIGHT
from ..errors import NotHeld, WouldDeadlock
from ..errors._base import RELEASE_TO_WRITE, listed
from .grant import Grant, TaskRef, current_ref, ended
from .manager import GrantManager
from .settings import ENDLESS

# -- Which of several leases a ``release()`` without a name gives back -----------------------------------------
#
# It is the latest that the current task acquired. If there is none, it is the one left behind by a task that has
# ended, if that is certain. The lease of a living task is never released on a guess of another task. `LeaseContext`
# has the same rule for exits.


L = TypeVar("L", bound=Grant)


def to_release(held: Sequence[L], *names: str) -> L:
    """Return the lease of ``held`` (oldest first) that a release gives back; raise NotHeld if none is certain.

    ``names`` are those of the locks, for the message.
    """
    leases = [lease for lease in held if lease.group is None]
    task = current_ref()
    own = [lease for lease in leases if lease.acquirer is not None and lease.acquirer == task]
    if own:
        return own[-1]
    left_behind = [lease for lease in leases if lease.acquirer is not None and ended(lease.acquirer)]
    if len(left_behind) == 1:
        return left_behind[0]
    found = "neither does any other task of this process. Release the lease where it was acquired"
    if holders := [_holder(lease) for lease in held]:
        more = f" and {len(holders) - MAX_HOLDERS} more" if len(holders) > MAX_HOLDERS else ""
        shown = ", ".join(holders[:MAX_HOLDERS]) + more
        found = f"in this process it is held by {shown}. Release that very lease: lease.release()"
    raise NotHeld(f"this task holds no lease on {listed(names)}; {found}")


MAX_HOLDERS = 5
"""Holders that one message shows."""


def _holder(lease: Grant) -> str:
    if lease.group is not None:
        return f"a lease that stands on several, or that its owner may reenter (fence {lease.fence})"
    task = None if lease.acquirer is None else lease.acquirer()
    if task is None or task.done():
        return f"a task that has ended (fence {lease.fence})"
    return f"the task {task.get_name()!r} (fence {lease.fence})"


def deadlock(name: str, held: Iterable[Grant], task: TaskRef, reads: bool) -> WouldDeadlock | None:
    """Return the error for ``task`` if it would wait for its own body, which holds one of ``held``.

    ``reads`` tells that it asks to read, next to other readers.
    """
    for lease in held:
        writes = lease.weight == WRITER_WEIGHT
        if lease.blocks_own_task(task) and (writes or not reads):
            use = "use AsyncReentrantLock for both, or pass the lease down instead of acquiring again"
            if isinstance(lease.keys, PermitKeys):
                use = "go on with that lease, or downgrade() it" if writes else RELEASE_TO_WRITE
            return WouldDeadlock.own_body(name, fence=lease.fence, use=use)
    return None


MARK = "detached"
"""The beginning of the text."""


def why_attached(grant: Grant) -> str | None:
    """Return the reason why the lease of a lock or a semaphore cannot be detached; None: it can."""
    if grant.identity is not None:
        return "it has an identity. Acquire it by the same identity instead"
    if grant.keys.engine == "watch":
        return 'attaching needs scripts. Acquire it by a lock without engine="watch"'
    if type(grant) is not Grant:
        return "tasks of this process share it. Acquire it by a lock without share=True"
    return None


async def detach(grant: Grant, ttl_ms: int | None) -> str:
    """Let go of ``grant``, with ``ttl_ms`` (None: its own ttl) from now on the server; see `Lease.detach`."""
    grant.check_context()
    manager = grant.manager
    if (why := why_attached(grant)) is not None:
        raise ValueError(f"the lease on {grant.name!r} cannot be detached: {why}")
    assert isinstance(manager, GrantManager)  # that of a shared lease is another
    grant.check()
    left = grant.hold_limit - now()
    if ttl_ms is None and left < grant.ttl_ms / 1000:
        ttl_ms = max(1, int(left * 1000))
    elif ttl_ms is not None and ttl_ms / 1000 > left:
        raise ValueError(
            f"the lease on {grant.name!r} may be held for {left:.3f} seconds more (max_hold), and ttl must not be "
            f"longer, not {ttl_ms / 1000:g}: detach it for a shorter time, or raise max_hold"
        )
    if grant.period < ENDLESS or ttl_ms is not None:
        await grant.extend(grant.ttl_ms if ttl_ms is None else ttl_ms)
        grant.check()  # it may have been released meanwhile
    grant.end_body()
    manager.let_go(grant)
    return f"{MARK}.{_text(grant.wire_token)}.{_sum(grant.keys, grant.wire_token)}"


def token_of(value: str, keys: Keys) -> bytes:
    """Return the token that holds the lease at the server; raise ValueError unless ``value`` is one of these keys."""
    if not isinstance(value, str):
        raise TypeError(f"a token of Lease.detach is str, not {type(value).__name__}")
    mark, _, rest = value.partition(".")
    encoded, _, check = rest.partition(".")
    try:
        token = base64.b64decode(encoded, b"-_", validate=True)
    except (binascii.Error, ValueError):
        token = b""
    if mark != MARK or not token or len(check) != SUM:
        raise ValueError("attach takes the text that Lease.detach returned, and this is not one")
    if check != _sum(keys, token):
        raise ValueError("the token was detached from another name, or from another kind of lock")
    return token


SUM = 12
"""The characters of a check sum."""


def _text(token: bytes) -> str:
    return base64.urlsafe_b64encode(token).decode()


def _sum(keys: Keys, token: bytes) -> str:
    return hashlib.sha256(keys.all[0] + b" " + token).hexdigest()[:SUM]
