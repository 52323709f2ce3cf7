"""The names of everything on the server. No other module spells a key or a channel.

    NAME            string    the holder's token, exactly as other Redis locks write it
    {NAME}:queue    zset      tickets of those who wait; score = order of arrival
    {NAME}:polls    zset      tickets that are polled for: until when each is alive (ms, server time)
    {NAME}:fence    string    the last fence granted, and to which token
    rsa:…           channel   inbox of one coordinator

All keys of one name share a hash slot: they carry NAME's own hash tag, or NAME itself as the tag.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_NAME_BYTES = 8192
INBOX_PREFIX = b"rsa:"


@dataclass(frozen=True, slots=True)
class LockKeys:
    """The keys of one lock, as bytes on the wire."""

    name: bytes
    queue: bytes
    fence: bytes
    polls: bytes

    all: tuple[bytes, ...]  # in the order in which scripts take them
    heads: dict[bytes, bytes] = field(default_factory=dict, repr=False, compare=False)
    """Packed beginnings of commands on these keys, by script: see `_link.wire`."""


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
    keys = (name, stem + b":queue", stem + b":fence", stem + b":polls")
    return LockKeys(*keys, all=keys)
