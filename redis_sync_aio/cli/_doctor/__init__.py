"""The command `doctor`: look at a server, and say what its settings mean for locks. It writes nothing there.

`facts` asks, and has the answers; `findings` has the table that judges them.
"""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._session import Session
from .facts import facts_of, replica_facts, rights_of, sentinel_facts, servers
from .findings import LEVELS, Finding, Level, of_replicas, of_rights, of_sentinels, of_server

EXITS = {
    0: "all is well, as far as it can be read",
    1: "some settings are risky for locks (warn)",
    2: "some settings break locks (bad), or wrong usage",
}
CODES: dict[Level, int] = {"ok": 0, "unknown": 0, "warn": 1, "bad": 2}
COLOURS: dict[Level, str] = {"ok": "green", "unknown": "cyan", "warn": "yellow", "bad": "bold red"}


async def doctor(session: Session) -> int:
    """Check a server, its replicas, cluster or sentinels for what goes wrong with locks.

    Each line says what was found, what it means for locks, and how to fix it. Nothing is written to the server.
    """
    asked, primary = servers(session), None
    findings = [*of_rights(await rights_of(session, next(iter(asked.values()))))]
    for where, ask in asked.items():
        facts = await facts_of(where, ask)
        primary = primary or facts
        findings += of_server(facts, where if len(asked) > 1 else "")
    watching = await sentinel_facts(session)
    findings += of_sentinels(watching)
    if primary is not None:
        findings += of_replicas(primary, await replica_facts(session, watching), watching)
    findings.sort(key=lambda one: LEVELS.index(one.level), reverse=True)
    level = findings[0].level
    report = {"address": session.address.shown, "level": level, "findings": [asdict(one) for one in findings]}
    session.output.show(report, lambda console: show(findings, session.address.shown, console))
    return CODES[level]


def show(findings: list[Finding], address: str, console: Console) -> None:
    """Print a table in a terminal, else one line for each finding."""
    if not console.is_terminal:
        for it in findings:
            check = f"{it.check} {it.where}" if it.where else it.check
            parts = (f"{it.found}.", it.meaning, f"Fix: {it.fix}" if it.fix else "")
            print(f"{it.level:7} {check}: {' '.join(filter(None, parts))}")
        return
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for it in findings:
        # As Text: what servers and users are called may look like markup.
        found = [Text(f"{it.where}: {it.found}" if it.where else it.found)]
        found += [Text(it.meaning, style="dim")] if it.meaning else []
        found += [Text(f"Fix: {it.fix}")] if it.fix else []
        table.add_row(Text(it.level, style=COLOURS[it.level]), it.check, Text("\n").join(found))
    console.print(Text(f"{address}\n"), table, sep="\n")
