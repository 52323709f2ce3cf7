"""The rights of the user of the connection, found out without writing anything."""

from __future__ import annotations

import secrets
from typing import Any

from redis.exceptions import RedisError, ResponseError

from redis_sync_aio._core.keys import INBOX_PREFIX

from .._session import Session, try_to_connect
from .facts import Refused, Rights
from .key_rights import KeyRights, key_rights
from .questions import Ask

KEY = "redis-sync-aio:doctor"
COMMANDS: dict[str, tuple[Any, ...]] = {
    "GET": (KEY,),
    "SET": (KEY, ""),
    "DEL": (KEY,),
    "PTTL": (KEY,),
    "PEXPIRE": (KEY, 1),
    "TIME": (),
    "ZADD": (KEY, 1, ""),
    "ZREM": (KEY, ""),
    "ZRANGE": (KEY, 0, 0),
    "ZSCORE": (KEY, ""),
    "ZCARD": (KEY,),
    "HMGET": (KEY, ""),
    "HGET": (KEY, ""),
    "HSET": (KEY, "", ""),
    "HDEL": (KEY, ""),
    "ZRANGEBYSCORE": (KEY, 0, 0),
    "ZREMRANGEBYRANK": (KEY, 0, 0),
}
"""The commands in the scripts of locks, semaphores and so on, with arguments for ACL DRYRUN."""
UNKNOWN = "0" * 40
"""The digest of no script: the server answers a user that may call scripts that there is none, and does nothing."""


async def rights_of(session: Session, ask: Ask) -> Rights:
    """Return what the user may do."""
    called = await ask("EVALSHA", UNKNOWN, 0)
    scripts = called if isinstance(called, Refused) and "NOSCRIPT" not in called.why.upper() else None
    if scripts is not None and "no matching script" in scripts.why.lower():
        scripts = None
    user = await ask("ACL", "WHOAMI")
    user = "" if isinstance(user, Refused) else str(user)
    missing: list[str] | None = await _missing(user, ask) if user else None
    resp3, push, listeners = await _push(session, ask)
    keys = await _keys(user, ask, session.prefix) if user else None
    known = missing is not None
    return Rights(user, scripts, known, missing or [], keys, resp3, push, listeners, session.prefix)


async def _missing(user: str, ask: Ask) -> list[str] | None:
    """Return the commands that are not allowed; None if the server does not tell."""
    found: list[str] = []
    for name, arguments in COMMANDS.items():
        answer = await ask("ACL", "DRYRUN", user, name, *arguments)
        if isinstance(answer, Refused):
            return None
        if "command" in str(answer):  # else it is OK, or it is about the key, and locks may have other names
            found.append(name)
    return found


async def _keys(user: str, ask: Ask, prefix: str) -> KeyRights | None:
    """Return which names may be locked; None if the server does not tell, or if what it tells is not simple."""
    answer = await ask("ACL", "GETUSER", user)
    about = {} if isinstance(answer, Refused) else dict(zip(answer[::2], answer[1::2], strict=False))
    if "keys" not in about or about.get("selectors"):
        return None
    words = about["keys"] if isinstance(about["keys"], list) else about["keys"].split()  # a list before Redis 7
    patterns = [word.removeprefix("%RW").removeprefix("~") for word in words if not word.startswith(("%R~", "%W~"))]
    return key_rights(patterns, prefix)


async def _push(session: Session, ask: Ask) -> tuple[Refused | None, Refused | None, int]:
    """Subscribe to a channel of our own, publish there, and count who gets it, as the link of locks does."""
    channel = session.prefix + (INBOX_PREFIX + secrets.token_hex(8).encode()).decode()
    async with session.another_client(protocol=3) as client:
        try:
            await try_to_connect(client)
        except RedisError as error:
            return Refused(str(error)), None, 1
        async with client.pubsub() as pubsub:
            try:
                await pubsub.subscribe(channel)
                await pubsub.get_message(timeout=session.response_timeout)
            except ResponseError as error:
                return None, Refused(str(error)), 1
            published = await ask("PUBLISH", channel, "")
            if isinstance(published, Refused):
                return None, published, 1
            if await pubsub.get_message(timeout=session.response_timeout) is None:
                return None, Refused("a message that was published did not arrive"), 1
            return None, None, int(published)
