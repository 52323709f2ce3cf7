"""The command itself: ask every server, judge, print."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._session import Session, Shared, execute
from . import groups, safety, sentinels, settings
from .facts import Facts, facts_of, rights_of, servers
from .groups import LEVELS, Finding, Level, worst
from .sentinels import replica_facts, sentinel_facts

EXITS = {
    0: "all is well, as far as it can be read",
    1: "some settings are risky for locks (warn)",
    2: "some settings break locks (bad), or wrong usage",
}
CODES: dict[Level, int] = {"ok": 0, "unknown": 0, "warn": 1, "bad": 2}
COLOURS: dict[Level, str] = {"ok": "green", "unknown": "cyan", "warn": "yellow", "bad": "bold red"}


def doctor(shared: Shared) -> None:
    """Check a server, its replicas, cluster or sentinels for what goes wrong with locks.

    Each line says what was found, what it means for locks, and how to fix it. Nothing is written to the server.
    """
    execute(shared, examine, decode_responses=True)


async def examine(session: Session) -> int:
    """Ask all servers, print what was found, and return the exit code."""
    asked, primary = servers(session), None
    findings = [*groups.rights(await rights_of(session, next(iter(asked.values()))))]
    for where, ask in asked.items():
        facts = await facts_of(where, ask)
        primary, judged = primary or facts, judge(facts)
        findings += [replace(one, where=where) for one in judged] if len(asked) > 1 else judged
    watching = await sentinel_facts(session)
    findings += sentinels.sentinels(watching)
    if primary is not None:
        findings += sentinels.replicas(primary, await replica_facts(session, watching), watching)
    findings.sort(key=lambda one: LEVELS.index(one.level), reverse=True)
    level = worst(findings)
    report = {"address": session.address.shown, "level": level, "findings": [one.as_dict() for one in findings]}
    session.output.show(report, lambda console: show(findings, session.address.shown, console))
    return CODES[level]


def judge(facts: Facts) -> list[Finding]:
    """Return what the facts about one server mean for locks."""
    checks = (*settings.CHECKS, *safety.CHECKS, *groups.CHECKS)
    return [finding for check in checks for finding in check(facts)]


def show(findings: list[Finding], address: str, console: Console) -> None:
    """Print a table in a terminal, else one line for each finding."""
    if not console.is_terminal:
        for finding in findings:
            console.print(finding.line(), markup=False, soft_wrap=True)
        return
    console.print(f"{address}\n", markup=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        where = f"{finding.where}: " if finding.where else ""
        # As Text: what servers and users are called may look like markup.
        level = Text(finding.level, style=COLOURS[finding.level])
        table.add_row(level, finding.check, Text(where + finding.found))
        if finding.meaning:
            table.add_row("", "", Text(finding.meaning, style="dim"))
        if finding.fix:
            table.add_row("", "", Text(f"Fix: {finding.fix}"))
    console.print(table)
