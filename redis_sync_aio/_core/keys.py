"""The names of everything on the server. No other module spells a key or a channel (scripts spell `rsa:`).

    NAME            string    the holder's token, exactly as other Redis locks write it
    {NAME}:queue    zset      tickets of those who wait; score = when each came (us, server time), in their order
    {NAME}:polls    zset      tickets that are polled for: until when each is alive (ms, server time)
    {NAME}:fence    string    the last fence granted, and to which token
    {NAME}:record   hash      of a robust lock: whose work it is, and how far it has come
    {NAME}:gate     string    the highest fence that a gate has accepted
    {NAME}:sem…     zset      permits of a semaphore: token -> until when (us, server time)
    {NAME}:rw…      zset      the same of a read/write lock
      …:state       hash      limit, sum of the weights, last fence, until when the keys last, whether a process shares;
                              weight and fence of each permit
      …:queue, …:polls        as above
    {KEY}:turn      string    lock of the transactions on KEY that take turns; with queue, fence and polls
    {KEY}:commit:…  string    whether one transaction on KEY was committed: "done" or "void"
    rsa:…           channel   inbox of one coordinator; in a cluster, of one at one shard; and its presence

All keys of one name share a hash slot: they carry NAME's own hash tag, or NAME itself as the tag.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

MAX_NAME_BYTES = 8192
INBOX_PREFIX = b"rsa:"

CLUSTER_MARK = b"C"
"""In the inboxes of a cluster (the rest is in small letters): see `Endpoint.at`, and include/publish.lua."""
POLLING_MARK = b"D"
"""In the tokens of a process that has no inbox, since it polls. It is hexadecimal, too, like what is around it."""
PRESENCE_DIGITS = 8
"""Hexadecimal digits at the beginning of an inbox that stay the same for as long as its coordinator lives."""
SHARING_MARK = b"~"
"""The end of a token under which the tasks of a process share a lease: see include/sharing_token.lua."""

LABEL_MARK = b"@"
"""The end of a label: a token is "label@host:pid:inbox:number", or has no label."""

Engine: TypeAlias = Literal["auto", "lua", "watch"]
Family: TypeAlias = Literal["lock", "robust", "permits", "upgrade", "gate"]


class Endpoint(NamedTuple):
    """The name by which a server knows this process."""

    inbox: bytes  # receives pushed grants; empty: none, the process polls
    token_prefix: bytes

    @classmethod
    def new(cls, process: str, unique: str) -> Endpoint:
        """Make the endpoint of a process that describes itself so. ``unique`` is hexadecimal: see `snapshot.Sharer`."""
        return cls(INBOX_PREFIX + unique.encode(), f"{process}:{unique}:".encode())

    @property
    def shown(self) -> bytes:
        """What CLIENT LIST shows of this process: its host and number, as in its tokens."""
        process = b":".join(self.token_prefix.split(b":")[:-2])
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
        """
        mark = b"%b%02x" % (CLUSTER_MARK, shard)
        return Endpoint(self.inbox + mark, self.token_prefix[:-1] + mark + b":")

    def again(self) -> Endpoint:
        """Return a new endpoint for the same server: the former inbox has no listener any more."""
        former = self.inbox.removeprefix(INBOX_PREFIX)
        unique, mark, shard = former.partition(CLUSTER_MARK)
        stays = unique[:PRESENCE_DIGITS]
        now = stays + secrets.token_hex((len(unique) - len(stays)) // 2).encode() + mark + shard
        return Endpoint(INBOX_PREFIX + now, self.token_prefix.removesuffix(former + b":") + now + b":")


_MAKER = re.compile(
    rb"(?:(.+)%b)?([^:]{1,32}):(\d{1,10}):([0-9a-f]{16}(?:%b[0-9a-f]+)?)(%b)?:\d+(?:%b)?"
    % (LABEL_MARK, CLUSTER_MARK, POLLING_MARK, SHARING_MARK),
    re.DOTALL,
)


def _presence(inbox: bytes) -> bytes:
    return inbox[: len(INBOX_PREFIX) + PRESENCE_DIGITS]


class Maker(NamedTuple):
    """The process that made a token, as the token says."""

    host: str
    pid: int
    inbox: bytes
    presence: bytes
    """As `Endpoint.presence`."""
    polls: bool
    """Whether it listened to nothing when it made the token."""
    label: bytes | None
    """The name that this process has in an election."""

    @classmethod
    def of(cls, token: bytes) -> Maker | None:
        """Return the process that made ``token``; None for an identity, and for a token of another package."""
        if (found := _MAKER.fullmatch(token)) is None:
            return None
        label, host, pid, unique, polls = found.groups()
        inbox, shown = INBOX_PREFIX + unique, host.decode("utf-8", "backslashreplace")
        return cls(shown, int(pid), inbox, _presence(inbox), polls is not None, label)


def of_cluster(inbox: bytes) -> bool:
    """Return whether that is the inbox of a process at a shard of a cluster."""
    return CLUSTER_MARK in inbox


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one name, as bytes on the wire."""

    family: ClassVar[Family]
    """The family of scripts that take them."""
    release_args: ClassVar[tuple[bytes, ...]] = ()
    """The last arguments of a release that ends no lease (it only withdraws a ticket)."""

    name: bytes  # as users know it
    all: tuple[bytes, ...]  # in the order in which scripts take them
    heads: dict[bytes, bytes] = field(default_factory=dict, repr=False, compare=False)
    """Cache of the sender: packed beginnings of commands on these keys, which end with them."""
    engine: Engine = "auto"
    """The engine that executes decisions about them."""
    id: bytes = field(init=False, repr=False, compare=False)
    """The identifier of these keys in this process."""

    def __post_init__(self) -> None:
        kind = f"{self.engine} {self.family} "  # neither has a space, so no key can look like another's id
        object.__setattr__(self, "id", kind.encode() + self.all[0])

    def by(self, engine: Engine) -> Self:
        """Return the same keys for another engine. What this process knows of each is kept apart."""
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
    release_args: ClassVar[tuple[bytes, ...]] = (b"", b"0")

    @property
    def record(self) -> bytes:
        """The key of the record: how far the work of the last holder has come."""
        return self.all[4]


class GateKeys(Keys):
    """The key of one gate for fences."""

    __slots__ = ()
    family: ClassVar[Family] = "gate"


class PermitKeys(Keys):
    """The keys of one semaphore, or of one read/write lock."""

    __slots__ = ()
    family: ClassVar[Family] = "permits"

    @property
    def of_semaphore(self) -> bool:
        """Whether they are the keys of a semaphore."""
        return self.all[0].endswith(b":sem")


class UpgradeKeys(PermitKeys):
    """The keys of a read/write lock, for a reader that becomes the writer."""

    __slots__ = ()
    family: ClassVar[Family] = "upgrade"


def hash_tag(key: bytes) -> bytes:
    """Return the part of ``key`` that Redis Cluster hashes (the specification's rule)."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            return key[start + 1 : end]
    return key


def lock_keys(name: bytes) -> LockKeys:
    """Return the keys of the lock called ``name``.

    Raises ValueError when the name is empty, longer than 8192 bytes, or has braces that would put its
    keys into different hash slots.
    """
    stem = _stem(name)
    return LockKeys(name, (name, stem + b":queue", stem + b":fence", stem + b":polls"))


def joined_keys(keys: Sequence[Keys]) -> LockKeys | None:
    """Return the keys of several locks for one script, in order; None when they are in different hash slots."""
    if len({hash_tag(one.name) for one in keys}) != 1:
        return None
    every = tuple(key for one in keys for key in one.all)
    return LockKeys(keys[0].name, every, engine=keys[0].engine)


def robust_keys(name: bytes) -> RobustKeys:
    """Return the keys of the robust lock called ``name``; raises as `lock_keys`."""
    return RobustKeys(name, (*lock_keys(name).all, _stem(name) + b":record"))


def gate_keys(name: bytes) -> GateKeys:
    """Return the key of the gate called ``name``; raises as `lock_keys`."""
    return GateKeys(name, (_stem(name) + b":gate",))


def permit_keys(name: bytes, kind: Literal["sem", "rw"]) -> PermitKeys:
    """Return the keys of the semaphore ("sem") or read/write lock ("rw") called ``name``; raises as `lock_keys`."""
    stem = _stem(name) + b":" + kind.encode()
    return PermitKeys(name, (stem, stem + b":state", stem + b":queue", stem + b":polls"))


def upgrade_keys(keys: PermitKeys) -> UpgradeKeys:
    """Return the keys of a read/write lock for a reader that becomes the writer."""
    return UpgradeKeys(keys.name, keys.all, engine=keys.engine)


def turn_key(key: bytes) -> bytes:
    """Return the name of the lock by which transactions on ``key`` take turns, in its hash slot.

    Raises ValueError as `lock_keys`.
    """
    return _stem(key) + b":turn"


def marker_key(key: bytes, unique: bytes) -> bytes:
    """Return the key that tells whether one transaction on ``key`` was committed, in the same hash slot."""
    return _stem(key) + b":commit:" + unique


_LEFT_BEHIND = re.compile(rb"(.+?):(?:(sem|rw)(?::(?:state|queue|polls))?|queue|fence|polls|record)", re.DOTALL)
KEY_ENDINGS = b"[}:]:[fpqrs]*"
"""A pattern of SCAN for the ends of all keys but NAME."""


def keys_around(key: bytes) -> Keys | None:
    """Return the keys of the lock, semaphore or read/write lock that ``key`` belongs to.

    None for a key that is none of theirs, and for NAME itself: any string may be a lock.
    """
    if (found := _LEFT_BEHIND.fullmatch(key)) is None:
        return None
    stem, kind = found[1], found[2]
    name = stem[1:-1] if stem[:1] == b"{" and stem[-1:] == b"}" else stem[:-1]
    try:
        keys: Keys = lock_keys(name) if kind is None else permit_keys(name, "sem" if kind == b"sem" else "rw")
    except ValueError:
        return None
    # Checked: `a` and `{a}` have other keys, and a name may look like a key.
    return keys if key in keys.all or (key == stem + b":record" and keys.all[1] == stem + b":queue") else None


def _stem(name: bytes) -> bytes:
    if not name:
        raise ValueError("the name of a lock must not be empty")
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(
            f"the name of a lock has at most {MAX_NAME_BYTES} bytes, this one has {len(name)}: {name[:40]!r}…"
        )
    tag = hash_tag(name)
    # A name with a tag of its own gets one colon more, so that `a` and `{a}` share no key.
    stem = name + b":" if tag != name else b"{" + name + b"}"
    if hash_tag(stem) != tag:
        raise ValueError(
            f"the braces in the name {name!r} break its hash tag: its keys would lie in different slots; "
            "write a whole tag, as in 'orders:{42}', or leave braces out"
        )
    return stem
