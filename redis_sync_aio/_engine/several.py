"""One command about several locks of one hash slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._keys import Keys, LockKeys, hash_tag
from .._link.call import Call
from .._scripts import load
from .lua import Done, LuaEngine


def joined(keys: Sequence[Keys]) -> LockKeys | None:
    """Return the keys of several locks for one script, in order; None when they are in different hash slots."""
    if len({hash_tag(one.name) for one in keys}) != 1:
        return None
    every = tuple(key for one in keys for key in one.all)
    return LockKeys(keys[0].name, every, engine=keys[0].engine)


def acquire_all(
    engine: LuaEngine,
    keys: LockKeys,
    prefix: bytes,
    numbers: Iterable[int],
    ttl_ms: int,
    sent: float,
    expires: float,
    done: Done,
) -> Call:
    """Ask for all of `joined` locks at once, each for the token of ``prefix`` and its number. Does not queue."""
    words = (ttl_ms, prefix, b" ".join(b"%d" % number for number in numbers))
    call = Call(keys, load("acquire_all"), words, sent, expires, done)
    engine.executor.send(call)
    return call
