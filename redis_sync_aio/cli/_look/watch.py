"""``watch``: a line for each change."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from typing import Annotated

import typer

from redis_sync_aio import SyncError
from redis_sync_aio.inspection import inspect

from .._output import complain
from .._session import Session, execute
from .._shared import Shared
from .changes import Change, changes, keyed
from .ls import finished

EXITS = {0: "whatever reads the output has closed it"}
MOST = 100_000
"""Names that are looked at."""

Interval = Annotated[float, typer.Option("--interval", "-i", min=0.05, metavar="S", help="Seconds between two looks.")]


def watch(
    shared: Shared,
    name: Annotated[
        str,
        typer.Argument(help="A name, or a pattern as in KEYS: 'orders:*'.", show_default=False, callback=finished),
    ] = "*",
    interval: Interval = 0.5,
) -> None:
    """Print a line for each change: granted, released, expired, waits, left (gave up, or was served and is done).

    It looks every --interval seconds, so what comes and goes between two looks is not seen. The first look tells of
    what is held and waited for already, as granted and waits. Only reads are sent to the server. With --json each line
    is a JSON document. While the server does not answer, it says so once and tries again. End it with Ctrl-C.
    """
    execute(shared, lambda session: follow(session, name, interval))


async def follow(session: Session, pattern: str, interval: float) -> int:
    """Print changes; report errors after the first look once, and go on."""
    loop = asyncio.get_running_loop()
    before, looked = keyed(()), loop.time()
    looked_once = failing = False
    while True:
        started = loop.time()
        try:
            now = keyed(await inspect(session.client, pattern, limit=MOST, prefix=session.prefix))
        except SyncError as error:
            if not looked_once:
                raise
            if not failing:
                complain(f"{error}. It looks again every {interval:g} seconds")
            failing = True
            await asyncio.sleep(interval)
            continue
        looked_once, failing = True, False
        for change in changes(before, now, started - looked):
            tell(session, change)
        sys.stdout.flush()
        before, looked = now, started
        await asyncio.sleep(interval)


def tell(session: Session, change: Change) -> None:
    """Print one change, with the time of day."""
    at = datetime.now().astimezone()
    if session.output.as_json:
        session.output.json({"time": at.isoformat(timespec="milliseconds"), **change.as_json()})
    else:
        print(f"{at:%H:%M:%S}  {change.line()}")
