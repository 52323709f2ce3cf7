"""The names of everything on the server. No other module spells a key or a channel (scripts spell `rsa:`).

    NAME            string    the holder's token, exactly as other Redis locks write it
    {NAME}:queue    zset      tickets of those who wait; score = when each came (us, server time), in their order
    {NAME}:polls    zset      tickets that are polled for: until when each is alive (ms, server time)
    {NAME}:fence    string    the last fence granted, and to which token
    {NAME}:record   hash      of a robust lock: whose work it is, and how far it has come
    {NAME}:mark     string    of jobs: what became of the work under the lock NAME
    {NAME}:gate     string    the highest fence that a gate has accepted
    {NAME}:sem…     zset      permits of a semaphore: token -> until when (us, server time)
    {NAME}:rw…      zset      the same of a read/write lock; :event…, :latch…, :barrier…
      …:state       hash      limit, sum of the weights, last fence, until when the keys last, whether a process shares;
                              weight and fence of each permit
      …:queue, …:polls        as above
    {KEY}:turn      string    lock of the transactions on KEY that take turns; with queue, fence and polls
    {KEY}:commit:…  string    whether one transaction on KEY was committed: "done" or "void"
    rsa:…           channel   inbox of one coordinator; in a cluster, of one at one shard (from Redis 7.0 on a channel
                              of that shard, too: see `Endpoint.in_shard`); and its presence

All keys of one name share a hash slot: they carry NAME's own hash tag, or NAME itself as the tag.

A coordinator with a prefix renames: `orders` is the lock PREFIX{orders}, and `orders:{42}` is PREFIXorders:{42}: with a
colon at its end. So each of its keys begins with the prefix, and so does its inbox: see `qualified`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, get_args

from .arguments import require_text
from .display import shown, text

# -- Prefixes of keys and inboxes: what a user may give --------------------------------------------------------


MAX_PREFIX_CHARACTERS = 64

_PREFIX = re.compile(r"(?:[A-Za-z0-9_.:/-]*:)?")


def checked_prefix(prefix: object) -> bytes:
    """Return the prefix of keys and inboxes that a user gave; raise TypeError or ValueError if it cannot be one.

    It ends with a colon, so that `app1:` is not the beginning of `app10:`; it has no braces, so that names have the
    hash slots that they have without it; and none of its characters means anything in a pattern.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, not {shown(prefix)}")
    if len(prefix) > MAX_PREFIX_CHARACTERS or not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"prefix must consist of at most {MAX_PREFIX_CHARACTERS} letters of ASCII, digits, '_', '.', '/', '-' and "
            f"':', and end with ':', as in 'app1:'; not {shown(prefix)}"
        )
    return prefix.encode()


MAX_NAME_BYTES = 8192
INBOX_PREFIX = b"rsa:"

CLUSTER_MARK = b"C"
"""Marks the inbox of one shard; upper case, as the hex around it is lower case: see include/publish.lua."""
SHARD_MARK = b"E"
"""Marks an inbox that listens to SPUBLISH, too; it and 4 digits are its end: see `Endpoint.in_shard`."""
POLLING_MARK = b"D"
"""Marks tokens of a polling process. A hex digit, so that patterns of tokens still match."""
IN_SHARD = 8192
"""Numbers that are tried for an inbox in the slots of a shard: 2 on average of two shards, and 10 ms at most."""
PRESENCE_DIGITS = 8
"""Hexadecimal digits at the beginning of an inbox that stay the same for as long as its coordinator lives."""
SHARING_MARK = b"~"
"""The end of a token under which the tasks of a process share a lease: see include/sharing_token.lua."""

LABEL_MARK = b"@"
"""The end of a label: a token is "label@host:pid:inbox:number", or has no label. Nothing behind the label has it."""
MAX_LABEL_BYTES = 512

Engine: TypeAlias = Literal["auto", "lua", "watch"]
"""The way in which the server decides: by Lua scripts, with WATCH, or by scripts where they are allowed."""
Family: TypeAlias = Literal["lock", "robust", "permits", "gate", "mark"]
SlotState: TypeAlias = Literal["done", "running", "failed"]
"""The state of a slot of a job: its run has ended, is running, or was cancelled, killed, or raised."""


# -- The kinds of names: all else derives from these rows --------------------------------------------------------


Kind: TypeAlias = Literal["lock", "robust", "semaphore", "read_write", "event", "latch", "barrier"]
"""The kind of a name, as its keys on the server show."""
Ending: TypeAlias = Literal["", "sem", "rw", "event", "latch", "barrier"]
"""The end of the keys of a name that consists of permits, by its kind; empty: the name is a lock."""


@dataclass(frozen=True, slots=True)
class NameKind:
    """A kind of names: its words, the end of its keys, and its scripts."""

    name: Kind
    title: str
    """The kind in a sentence, with its article."""
    acquire: str
    release: str
    renew: str
    ending: Ending = ""
    closed: str = ""
    """The reason that a gate lets no waiter pass yet; empty: the name is held, and no gate."""
    watch: bool = False
    """True if it works without scripts, with WATCH."""


_LOCK_SCRIPTS = "lock/acquire", "lock/release", "lock/renew"
_PERMIT_SCRIPTS = "permits/acquire", "permits/release", "permits/renew"
LOCK = NameKind("lock", "a lock", *_LOCK_SCRIPTS, watch=True)
ROBUST = NameKind("robust", "a robust lock", *_LOCK_SCRIPTS, watch=True)
SEMAPHORE = NameKind("semaphore", "a semaphore", *_PERMIT_SCRIPTS, "sem", watch=True)
READ_WRITE = NameKind("read_write", "a read/write lock", *_PERMIT_SCRIPTS, "rw")
EVENT = NameKind("event", "an event", *_PERMIT_SCRIPTS, "event", "it has not been set")
LATCH = NameKind("latch", "a latch", *_PERMIT_SCRIPTS, "latch", "it was not counted down to 0")
BARRIER = NameKind(
    *("barrier", "a barrier", "barrier/join", "permits/release", "permits/renew"),
    ending="barrier",
    closed="not all of its parties have come",
)
KINDS: dict[str, NameKind] = {it.name: it for it in (LOCK, ROBUST, SEMAPHORE, READ_WRITE, EVENT, LATCH, BARRIER)}
"""Each kind of names, by its name."""
BY_ENDING: dict[str, NameKind] = {it.ending: it for it in KINDS.values() if it.ending}
"""The kinds that consist of permits, by the end of their keys."""
NEVER_HELD = frozenset(it.name for it in KINDS.values() if it.closed)
"""The names of the kinds that let waiters pass, and so have no holder."""


class Endpoint(NamedTuple):
    """The name by which a server knows this process."""

    inbox: bytes  # receives pushed grants; empty: none, the process polls
    token_prefix: bytes

    @classmethod
    def new(cls, process: str, unique: str, prefix: bytes = b"") -> Endpoint:
        """Make the endpoint of a process that describes itself so. ``unique`` is hexadecimal: see `inbox_of`."""
        return cls(prefix + INBOX_PREFIX + unique.encode(), b"%b:%b%b:" % (process.encode(), prefix, unique.encode()))

    @property
    def shown(self) -> bytes:
        """The name by which CLIENT LIST shows this process: its host and number, as in its tokens."""
        process = b":".join(self.token_prefix.split(b":")[:2])
        return b"redis_sync_aio:" + re.sub(rb"[^!-~]", b"?", process)

    @property
    def presence(self) -> bytes:
        """The channel that each connection of this process listens to, whatever its inbox is called now.

        Nothing is published to it. That it has a listener says that the process is connected: see `Maker`.
        """
        return _presence(self.inbox)

    def polling(self) -> Endpoint:
        """Return the endpoint of a process that has no inbox."""
        return Endpoint(b"", self.token_prefix[:-1] + POLLING_MARK + b":")

    def at(self, shard: int) -> Endpoint:
        """Return the endpoint by which this shard of a cluster knows us.

        Each shard has one of its own. A message that is published at one shard is heard at all of them, so a grant
        would arrive once for each link, and not behind the answer to its request. Its time is by the shard's clock.
        A process that polls gets no messages, so it has one endpoint for all shards.
        """
        if not self.inbox:
            return self
        return self._marked(b"%b%02x" % (CLUSTER_MARK, shard))

    def _marked(self, mark: bytes) -> Endpoint:
        return Endpoint(self.inbox + mark, self.token_prefix[:-1] + mark + b":")

    @property
    def is_in_shard(self) -> bool:
        """True if the inbox listens to SPUBLISH, too."""
        return self.inbox[-5:-4] == SHARD_MARK

    def in_shard(self, has: Callable[[bytes], bool]) -> Endpoint:
        """Return an endpoint whose inbox is in a slot of the shard, as ``has`` says: this one if it is.

        Scripts publish to it by SPUBLISH, which stays in the shard. PUBLISH goes to all nodes of the cluster, and is
        heard all the same: where SPUBLISH is refused, or the slot has left the shard. Without a slot in `IN_SHARD`
        tries, as the shard has just a few, the inbox listens to PUBLISH alone.
        """
        if self.is_in_shard and has(self.inbox):
            return self
        plain, start = self.in_cluster(), secrets.randbelow(1 << 16)
        for number in range(start, start + IN_SHARD):
            mark = b"%b%04x" % (SHARD_MARK, number & 0xFFFF)
            if has(plain.inbox + mark):
                return plain._marked(mark)
        return plain

    def in_cluster(self) -> Endpoint:
        """Return the endpoint whose inbox listens to PUBLISH alone."""
        return Endpoint(self.inbox[:-5], self.token_prefix[:-6] + b":") if self.is_in_shard else self

    def again(self) -> Endpoint:
        """Return a new endpoint for the same server: the former inbox has no listener any more."""
        if self.is_in_shard:
            return self.in_cluster().again()
        former = self.inbox.rpartition(b":")[2]
        unique, mark, shard = former.partition(CLUSTER_MARK)
        stays = unique[:PRESENCE_DIGITS]
        now = stays + secrets.token_hex((len(unique) - len(stays)) // 2).encode() + mark + shard
        inbox, token_prefix = self.inbox.removesuffix(former), self.token_prefix.removesuffix(former + b":")
        return Endpoint(inbox + now, token_prefix + now + b":")


_MAKER = re.compile(
    rb"(?:(.+)%b)?([^:]{1,32}):(\d{1,10}):((?:[\w.:/-]*:)?)([0-9a-f]{16}(?:%b[0-9a-f]+(?:%b[0-9a-f]{4})?)?)(%b)?:\d+(?:%b)?"
    % (LABEL_MARK, CLUSTER_MARK, SHARD_MARK, POLLING_MARK, SHARING_MARK),
    re.DOTALL,
)
_BEFORE_UNIQUE = re.compile(rb"[^:]*:\d+:(.*)", re.DOTALL)


def inbox_of(before: bytes, unique: bytes) -> bytes:
    """Return the inbox of the process whose tokens begin with ``before`` and ``unique``: see sharing_token.lua."""
    found = _BEFORE_UNIQUE.fullmatch(before.rpartition(LABEL_MARK)[2])
    return (found[1] if found else b"") + INBOX_PREFIX + unique


def _presence(inbox: bytes) -> bytes:
    return inbox[: inbox.rindex(b":") + 1 + PRESENCE_DIGITS]


class Maker(NamedTuple):
    """The process that made a token, as the token says."""

    host: str
    pid: int
    inbox: bytes
    presence: bytes
    """As `Endpoint.presence`."""
    polls: bool
    """True if it listened to nothing when it made the token."""
    label: bytes | None
    """The text for people that came with the request, or with its coordinator."""

    @classmethod
    def of(cls, token: bytes) -> Maker | None:
        """Return the process that made ``token``; None for an identity, and for a token of another package."""
        if (found := _MAKER.fullmatch(token)) is None:
            return None
        label, host, pid, prefix, unique, polls = found.groups()
        inbox, shown = prefix + INBOX_PREFIX + unique, host.decode("utf-8", "backslashreplace")
        return cls(shown, int(pid), inbox, _presence(inbox), polls is not None, label)


def process_name() -> str:
    """Return the name of this process in its tokens: "host:pid"."""
    return f"{socket.gethostname()[:32]}:{os.getpid()}"


def labelled(label: str | None) -> bytes:
    """Return the beginning of the tokens that are made for requests with this label; empty for None.

    Raises TypeError or ValueError for what is no label.
    """
    if label is None:
        return b""
    wire = require_text(label, "label").encode()
    if len(wire) > MAX_LABEL_BYTES:
        raise ValueError(f"label must have at most {MAX_LABEL_BYTES} bytes, not {len(wire)}: {shown(label)}")
    return wire + LABEL_MARK


def label_of(token: bytes) -> str:
    """Return the label in a token; without one "host:pid" of its process, or the token of an identity itself."""
    maker = Maker.of(token)
    if maker is None:
        return text(token)
    return f"{maker.host}:{maker.pid}" if maker.label is None else text(maker.label)


def inbox_pattern(inbox: bytes) -> bytes:
    """Return the pattern, as an ACL has it, of all inboxes with the prefix of ``inbox``."""
    return inbox.rpartition(b":")[0] + b":*"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one name, as bytes on the wire."""

    family: ClassVar[Family]
    """The family of scripts that take them."""

    name: bytes  # as users know it
    all: tuple[bytes, ...]  # in the order in which scripts take them
    heads: dict[bytes, bytes] = field(default_factory=dict, repr=False, compare=False)
    """Cache of the sender: packed beginnings of commands on these keys, which end with them."""
    engine: Engine = "auto"
    """The engine that executes decisions about them."""
    kind: NameKind = LOCK
    """The kind of the name; of a gate or a mark, that of its lock."""
    id: bytes = field(init=False, repr=False, compare=False)
    """The identifier of these keys in this process."""

    def __post_init__(self) -> None:
        apart = f"{self.engine} {self.family} "  # neither has a space, so no key can look like another's id
        object.__setattr__(self, "id", apart.encode() + self.all[0])

    def all_ids(self) -> list[bytes]:
        """Return the identifiers of all keys that stand for the same at the server, by any engine."""
        families = ("permits",) if isinstance(self, PermitKeys) else ("lock", "robust")
        return [f"{engine} {family} ".encode() + self.all[0] for engine in get_args(Engine) for family in families]

    def by(self, engine: Engine) -> Self:
        """Return the same keys for another engine. This process keeps its facts about each apart."""
        return self if engine == self.engine else replace(self, engine=engine)


class LockKeys(Keys):
    """The keys of one lock."""

    __slots__ = ()
    family: ClassVar[Family] = "lock"

    @property
    def queue(self) -> bytes:
        """The key of the queue: the tickets of waiters."""
        return self.all[1]

    @property
    def fence(self) -> bytes:
        """The key of the last fence, and the token that has it."""
        return self.all[2]

    @property
    def polls(self) -> bytes:
        """The key of the times until which polled-for tickets are alive."""
        return self.all[3]


class RobustKeys(LockKeys):
    """The keys of one robust lock: those of a lock, and a record."""

    __slots__ = ()
    family: ClassVar[Family] = "robust"

    @property
    def record(self) -> bytes:
        """The key of the record: how far the work of the last holder has come."""
        return self.all[4]


class GateKeys(Keys):
    """The key of one gate for fences."""

    __slots__ = ()
    family: ClassVar[Family] = "gate"


class MarkKeys(Keys):
    """The keys of one mark: that of the lock whose holder may change it, and its own."""

    __slots__ = ()
    family: ClassVar[Family] = "mark"

    @property
    def mark(self) -> bytes:
        """The key of the mark."""
        return self.all[1]


class PermitKeys(Keys):
    """The keys of one semaphore, or of something else that consists of permits."""

    __slots__ = ()
    family: ClassVar[Family] = "permits"


def hash_tag(key: bytes) -> bytes:
    """Return the part of ``key`` that Redis Cluster hashes (the specification's rule)."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            return key[start + 1 : end]
    return key


def qualified(name: bytes, prefix: bytes) -> bytes:
    """Return the name without a prefix of the lock ``name`` of a coordinator with this prefix; raises as `lock_keys`.

    It has a hash tag, so all keys of the lock begin with it. No two names become the same. A name that begins with "}"
    cannot stand in braces, so it is refused with a prefix.
    """
    if not prefix:
        return name
    if name.startswith(b"}"):
        raise ValueError(f"the name {name!r} begins with a brace, which cannot follow a prefix: leave the brace out")
    return prefix + _stem(name)


def check_slot(name: bytes, prefix: bytes = b"") -> None:
    """Raise ValueError if the keys of ``name`` would lie in different slots of a cluster."""
    full = qualified(name, prefix)
    if hash_tag(_stem(full)) != hash_tag(full):
        raise ValueError(
            f"the braces in the name {name!r} break its hash tag: its keys would lie in different slots of the "
            "cluster; write a whole tag, as in 'orders:{42}', or leave braces out"
        )


def lock_keys(name: bytes, prefix: bytes = b"") -> LockKeys:
    """Return the keys of the lock called ``name``.

    Raises ValueError when the name is empty, or longer than 8192 bytes. In a cluster see `check_slot`.
    """
    full = qualified(name, prefix)
    stem = _stem(full)
    return LockKeys(name, (full, stem + b":queue", stem + b":fence", stem + b":polls"))


def joined_keys(keys: Sequence[Keys]) -> LockKeys | None:
    """Return the keys of several locks for one script, in order; None when they are in different hash slots."""
    if len({hash_tag(one.all[0]) for one in keys}) != 1:
        return None
    every = tuple(key for one in keys for key in one.all)
    return LockKeys(keys[0].name, every, engine=keys[0].engine)


def robust_keys(name: bytes, prefix: bytes = b"") -> RobustKeys:
    """Return the keys of the robust lock called ``name``; raises as `lock_keys`."""
    keys = lock_keys(name, prefix)
    return RobustKeys(name, (*keys.all, record_key(keys)), kind=ROBUST)


def record_key(keys: LockKeys) -> bytes:
    """Return the key of the record that a lock has if it is a robust one."""
    return _stem(keys.all[0]) + b":record"


def gate_keys(name: bytes, prefix: bytes = b"") -> GateKeys:
    """Return the key of the gate called ``name``; raises as `lock_keys`."""
    return GateKeys(name, (_stem(qualified(name, prefix)) + b":gate",))


def permit_keys(name: bytes, ending: str, prefix: bytes = b"") -> PermitKeys:
    """Return the keys of the semaphore ("sem"), read/write lock ("rw") … called ``name``; raises as `lock_keys`."""
    stem = _stem(qualified(name, prefix)) + b":" + ending.encode()
    return PermitKeys(name, (stem, stem + b":state", stem + b":queue", stem + b":polls"), kind=BY_ENDING[ending])


def turn_key(key: bytes) -> bytes:
    """Return the name of the lock by which transactions on ``key`` take turns, in its hash slot.

    Raises ValueError as `lock_keys`.
    """
    return _stem(key) + b":turn"


def marker_key(key: bytes, unique: bytes, prefix: bytes = b"") -> bytes:
    """Return the key that tells whether one transaction on ``key`` was committed, in the same hash slot."""
    return prefix + _stem(key) + b":commit:" + unique


def mark_key(keys: Keys) -> bytes:
    """Return the key that tells what became of work under a lock."""
    return _stem(keys.all[0]) + b":mark"


def mark_keys(keys: Keys) -> MarkKeys:
    """Return the keys by which the mark of a lock is read and changed."""
    return MarkKeys(keys.name, (keys.all[0], mark_key(keys)), engine=keys.engine)


_OF_LOCKS = "queue", "fence", "polls", "record", "mark"
_LEFT_BEHIND = re.compile(
    rf"(.+?):(?:({'|'.join(BY_ENDING)})(?::(?:state|queue|polls))?|{'|'.join(_OF_LOCKS)})".encode(), re.DOTALL
)
KEY_ENDINGS = f"[}}:]:[{''.join(sorted({it[0] for it in (*BY_ENDING, *_OF_LOCKS, 'state')}))}]*".encode()
"""A pattern of SCAN for the ends of all keys but NAME."""


def keys_around(key: bytes, prefix: bytes = b"") -> Keys | None:
    """Return the keys of the lock, semaphore or read/write lock that ``key`` belongs to.

    None for a key that is none of theirs, and for NAME itself: any string may be a lock. Names without ``prefix`` are
    none of theirs either.
    """
    if (found := _LEFT_BEHIND.fullmatch(key)) is None:
        return None
    stem, ending = found[1], found[2]
    full = _without_stem(stem)
    if not full.startswith(prefix):
        return None
    name = _without_stem(full.removeprefix(prefix)) if prefix else full
    try:
        keys: Keys = lock_keys(name, prefix) if ending is None else permit_keys(name, ending.decode(), prefix)
    except ValueError:
        return None
    # Checked: `a` and `{a}` have other keys, and a name may look like a key.
    beside = ending is None and keys.all[1] == stem + b":queue"
    return keys if key in keys.all or (beside and key in (stem + b":record", stem + b":mark")) else None


def _stem(name: bytes) -> bytes:
    if not name:
        raise ValueError("the name of a lock must not be empty")
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(
            f"the name of a lock has at most {MAX_NAME_BYTES} bytes, this one has {len(name)}: {name[:40]!r}…"
        )
    # A name with a tag of its own gets one colon more, so that `a` and `{a}` share no key.
    return name + b":" if hash_tag(name) != name else b"{" + name + b"}"


def _without_stem(stem: bytes) -> bytes:
    """Return the name whose `_stem` this is, if it is one of a name."""
    return stem[1:-1] if stem[:1] == b"{" and stem[-1:] == b"}" else stem[:-1]


# -- The text of a mark: what became of the work of a job ------------------------------------------------------


DONE, RESULT, NOT_KEPT = "done", "result", "not kept"
"""The parts of the mark of a run that has returned: of `once`, and of `idempotent` with and without its result."""
FINGERPRINT = "fingerprint"
"""The part that each mark of `idempotent` has: what else must be equal in two calls with one name."""
FENCE = "begun"
"""The part that has the fence of the run, so that no two runs write the same text."""
FORGOTTEN = "raised"
"""The part of a mark that counts as none: its run raised. Late copies of earlier changes find it, and do nothing."""
BEGINNING = 256
"""Bytes of a mark that tell its state. One that is longer has a result."""
FORGOTTEN_MS = 60_000
"""Lifetime of a mark that counts as none."""


def said_by(text: str | bytes) -> dict[str, Any] | None:
    """Return the parts of a mark; None for a text of another program."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_forgotten(text: str | bytes) -> bool:
    """Return True if a mark counts as none; its beginning is enough."""
    said = said_by(text)
    return said is not None and FORGOTTEN in said


def is_done(said: Mapping[str, Any]) -> bool:
    """Return True if a mark says that its run has returned."""
    return not said.keys().isdisjoint((DONE, RESULT, NOT_KEPT))
