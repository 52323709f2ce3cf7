"""Values as messages show them."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors._base import listed as listed_text

LONGEST = 100
_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")


def shown(value: object) -> str:
    """Return the repr of a value that a caller gave, shortened if it is long."""
    whole = repr(value)
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 1]}…"


def listed(names: Collection[bytes]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    return listed_text(tuple(map(text, names)))


def text(value: bytes) -> str:
    """Return bytes from the server as text that can be shown; undecodable bytes are escaped."""
    return value.decode("utf-8", "backslashreplace")


def bytes_of(value: str) -> bytes:
    """Return the bytes of which `text` made ``value``, if they were not UTF-8."""
    return _ESCAPED.sub(lambda it: bytes([int(it[1], 16)]), value.encode())


def plain(value: str) -> str:
    """Return text from the server without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in value)


def not_a_lock(key: bytes, value: bytes) -> str:
    """Describe the key of a lock that another program wrote, without a ttl."""
    return (
        f"its key has the value {shown(text(value))} and no ttl, and this package did not write it, so it will not "
        "become free by itself. If it is data, give the lock another name. If it is a lock that another program "
        f"forgot, release it: {release_command(key, value)}"
    )


def release_command(key: bytes, token: bytes) -> str:
    """Return the command that ends the lease of ``token``.

    It names the key of the lock, which is also its name for a client without a prefix.
    """
    import shlex  # noqa: PLC0415  few programs ever say this, and all would load it

    name, value = (plain(text(it)) for it in (key, token))
    choice = f"--token {shlex.quote(value)}" if value else "--force"
    if len(value) > LONGEST:
        choice = "--token TOKEN"
    words = f"{choice} -- {shlex.quote(name)}" if name.startswith("-") else f"{shlex.quote(name)} {choice}"
    more = " (redis-sync-aio show prints the token)" if len(value) > LONGEST else ""
    return f"redis-sync-aio release {words}{more}"


def called(function: object) -> str:
    """Return the function as it is called, as in "Orders.charge()", without the address of its object."""
    inner = getattr(function, "func", function)  # of a functools.partial
    name = getattr(inner, "__qualname__", None)
    return repr(function) if name is None else f"{name}()"
