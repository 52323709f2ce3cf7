"""Judge which names a user may lock, by the patterns of the keys that it may use. Nothing here asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redis_sync_aio._core.keys import LockKeys, lock_keys
from redis_sync_aio._inspection.patterns import compiled, sample

EXAMPLE = "orders:"
"""The beginning of names for a user that may use no key."""


@dataclass(frozen=True, slots=True)
class KeyRights:
    """The names that a user may lock."""

    names: Sequence[str]
    """Patterns of them; "*": all."""
    keys: Sequence[str]
    """Patterns of the keys that it may use."""
    lacking: Sequence[str] = ()
    """Patterns of the keys that it lacks, if it may lock nothing."""


def key_rights(patterns: Sequence[str], prefix: str) -> KeyRights:
    """Return what a user may lock that may use keys like ``patterns``. ``prefix``: that of its coordinators.

    Which names locks have is not known, so each pattern stands for one name that it matches.
    """
    allowed = [compiled(pattern.encode()) for pattern in patterns]

    def lacking(name: str) -> list[str]:
        """Return the patterns of the keys that a lock of this name needs, and that are not allowed."""
        instance = sample(name.encode())
        if instance is None:
            return [name]
        keys = lock_keys(instance, prefix.encode())
        needed = zip(_patterns(keys, instance, name), (keys.all[:1], keys.all[1:]), strict=True)
        return [one for one, them in needed if not all(any(it.fullmatch(key) for it in allowed) for key in them)]

    if "*" in patterns or (prefix and not lacking("*")):
        return KeyRights(["*"], patterns)
    candidates = [names for pattern in patterns if (names := list(_names(pattern, prefix)))]
    usable = dict.fromkeys(name for names in candidates for name in names if not lacking(name))
    if usable:
        around = {f"{{{name}}}:*" for name in usable}
        return KeyRights([name for name in usable if name not in around], patterns)
    if candidates:
        found = [one for names in candidates for one in lacking(names[0])]
    else:
        found = [f"{prefix}*"] if prefix else lacking(f"{EXAMPLE}*")
    return KeyRights([], patterns, list(dict.fromkeys(found)))


def _names(pattern: str, prefix: str) -> Iterator[str]:
    """Iterate over the patterns of names that keys like ``pattern`` may belong to."""
    if not pattern.startswith(prefix):
        return
    rest = pattern.removeprefix(prefix)
    if rest and (not rest.startswith("{") or rest.count("{") == rest.count("}")):
        yield rest
    if rest.startswith("{") and (inside := rest[1:].partition("}")[0]):
        yield inside


def _patterns(keys: LockKeys, instance: bytes, name: str) -> tuple[str, str]:
    """Return the pattern of the key of a lock, and that of the keys around it. ``instance``: a name like ``name``."""
    key, around = keys.all[0], keys.queue.removesuffix(b"queue") + b"*"
    both = [it.rpartition(instance) for it in (key, around)]
    first, second = (f"{before.decode()}{name}{after.decode()}" for before, _, after in both)
    return first, second
