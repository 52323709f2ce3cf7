"""The findings of the doctor, and the checks of clusters and rights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from redis_sync_aio._core.keys import INBOX_PREFIX
from redis_sync_aio.errors._base import page

from .._session import counted
from .facts import EXAMPLE, Facts, Rights

# -- The findings of the doctor: one for each thing that it looked at ------------------------------------------


Level: TypeAlias = Literal["ok", "unknown", "warn", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warn", "bad")
"""From harmless to harmful; "unknown": it could not be read."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was found, what that means for locks, and how to change it."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    fix: str = ""
    where: str = ""
    """Which of several servers; empty if there is one."""

    def as_dict(self) -> dict[str, str]:
        """Return it as --json prints it."""
        return asdict(self)

    def line(self) -> str:
        """Return it as one line of text."""
        parts = [f"{self.found}.", self.meaning, f"Fix: {self.fix}" if self.fix else ""]
        where = f" {self.where}" if self.where else ""
        return f"{self.level:7} {self.check}{where}: {' '.join(part for part in parts if part)}"


def worst(findings: Iterable[Finding]) -> Level:
    """Return the most harmful level among the findings."""
    return LEVELS[max((LEVELS.index(one.level) for one in findings), default=0)]


def unreadable(check: str, what: str) -> Finding:
    """Return the finding for what this user, or this service, does not show."""
    return Finding(check, "unknown", f"{what} is not readable for this user, or not offered by this service")


SLOTS = 16384
_RIGHTS = page("operations/servers", "rights")


def cluster(facts: Facts) -> Iterator[Finding]:
    """Yield whether all names have a shard that takes locks, and keep one when a primary dies."""
    if not facts.cluster:
        return
    assigned, failing = (
        int(facts.cluster.get("cluster_slots_assigned", 0)),
        int(facts.cluster.get("cluster_slots_fail", 0)),
    )
    if assigned < SLOTS or failing:
        number = SLOTS - assigned + failing
        found = f"{number:,} of {SLOTS:,} slots {'has' if number == 1 else 'have'} no primary"
        meaning = f"Locks whose names hash to {'it' if number == 1 else 'them'} cannot be acquired."
        yield Finding("slots", "bad", found, meaning, "redis-cli --cluster check, then --cluster fix")
    if facts.cluster.get("cluster_state") != "ok":
        meaning = "The nodes refuse commands (CLUSTERDOWN), so no lock can be acquired or renewed."
        yield Finding("cluster", "bad", "cluster_state is not ok", meaning, "bring the failed nodes or slots back")
    else:
        yield Finding("cluster", "ok", "cluster_state is ok")
    if facts.settings.get("cluster-require-full-coverage") == "yes":
        found = "cluster-require-full-coverage is yes"
        meaning = "When one shard has no primary, the locks of all shards are unreachable."
        yield Finding("coverage", "warn", found, meaning, "CONFIG SET cluster-require-full-coverage no on all nodes")
    own = next((words for words in facts.nodes if len(words) > 2 and "myself" in words[2]), [])
    if moving := [word for word in own[8:] if word.startswith("[")]:
        found = f"{counted(len(moving), 'slot is', 'slots are')} half moved"
        those = "it" if len(moving) == 1 else "them"
        meaning = f"Locks whose names hash to {those} are renewed and released, but not granted."
        yield Finding("moving", "warn", found, meaning, "finish the move, or redis-cli --cluster fix")
    if own and not any(words[3] == own[0] and "fail" not in words[2] for words in facts.nodes if len(words) > 3):
        meaning = "When it dies, its locks are unreachable until it is back."
        yield Finding("shard", "warn", "this shard has no replica", meaning, "add a replica to it")


def rights(found: Rights) -> Iterator[Finding]:
    """Yield whether the user may do what locks need."""
    whose = f"user {found.user!r}" if found.user else "this user"
    if found.scripts is not None:
        disabled = "unknown command" in found.scripts.why.lower()
        what = "scripts are disabled on this server" if disabled else f"{whose} may not call scripts"
        meaning = "Locks and semaphores decide with WATCH instead, in two to three round trips; nothing else works."
        allow = f"ACL SETUSER {_user(found)} +evalsha +eval ({_RIGHTS})"
        fix = 'choose a server with scripts, or say engine="watch" if you mean it' if disabled else allow
        yield Finding("scripts", "warn", what, meaning, fix)
    else:
        yield Finding("scripts", "ok", f"{whose} may call scripts")
    if found.missing:
        what = f"{whose} may not run {', '.join(found.missing)}"
        meaning = "Locks, semaphores and all else that needs them raise PermissionDenied."
        allowed = " ".join(f"+{command.lower()}" for command in found.missing)
        yield Finding("commands", "bad", what, meaning, f"ACL SETUSER {_user(found)} {allowed} ({_RIGHTS})")
    elif found.commands_known:
        yield Finding("commands", "ok", f"{whose} may run all commands that locks need")
    else:
        yield Finding("commands", "unknown", "which commands are allowed is not readable (ACL DRYRUN)")
    yield keys(found, whose)
    yield push(found)


def keys(found: Rights, whose: str) -> Finding:
    """Return which names the user may lock: it needs the keys around them, too."""
    known, prefix = found.keys, found.prefix
    if known is None:
        return Finding("keys", "unknown", f"which keys {whose} may use is not readable (ACL GETUSER)")
    if known.names == ["*"]:
        return Finding("keys", "ok", f"{whose} may use all keys{f' that begin with {prefix}' if prefix else ''}")
    if known.names:
        meaning = "A lock of another name raises PermissionDenied."
        return Finding("keys", "ok", f"{whose} may lock names like {', '.join(known.names)}", meaning)
    what = f"{whose} may use {', '.join(known.keys) or 'no keys'}" + (
        ", but not all keys of a lock" if known.keys else ""
    )
    needed = (
        f"all keys of the lock NAME begin with {prefix}"
        if prefix
        else ("next to the key NAME, a lock has keys that begin with {NAME}")
    )
    example = f"for names that begin with {EXAMPLE}; " if f"{EXAMPLE}*" in known.lacking else ""
    fix = f"ACL SETUSER {_user(found)} {' '.join(f'~{one}' for one in known.lacking)} ({example}{_RIGHTS})"
    return Finding("keys", "bad", what, f"Every lock raises PermissionDenied: {needed}.", fix)


def _user(found: Rights) -> str:
    return found.user or "USER"


def push(found: Rights) -> Finding:
    """Return whether waiters are woken."""
    meaning = "Waiters poll instead of being woken: hand-overs are later, and cost more commands."
    if found.resp3 is not None:
        fix = "connect without the proxy, or to a server from version 6 on"
        return Finding("push", "warn", f"RESP3 (HELLO 3) is refused: {found.resp3.why.rstrip('.')}", meaning, fix)
    if found.push is not None:
        channels = f"{found.prefix}{INBOX_PREFIX.decode()}*"
        fix = f"ACL SETUSER {_user(found)} +subscribe +publish &{channels} ({_RIGHTS})"
        return Finding("push", "warn", f"messages cannot be pushed: {found.push.why.rstrip('.')}", meaning, fix)
    if found.listeners > 1:
        others = counted(found.listeners - 1, "other client receives", "other clients receive")
        what = f"{others} the messages of every channel"
        meaning = "The server cannot tell that a waiter is dead, and so grants it locks that nobody uses."
        return Finding("push", "warn", what, meaning, "end PSUBSCRIBE * of monitors and debuggers (CLIENT LIST, psub=)")
    return Finding("push", "ok", "messages are pushed to waiters")


CHECKS = (cluster,)
