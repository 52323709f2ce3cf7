"""The picture of a run of the demo: its sales and its kill, as a timeline that `redis_sync_aio.tracing` draws."""

from __future__ import annotations

from redis_sync_aio.tracing._svg import svg
from redis_sync_aio.tracing._timeline import Mark, Timeline, Turn

from .run import MS, ReportedGrant, Run


def timeline(run: Run, subtitle: str) -> str:
    """Return the picture of ``run`` as the text of an SVG file."""
    killed = 0 if run.kill is None else run.kill.process
    names = {grant.process: f"worker {grant.process}" for grant in run.grants}
    if killed:
        names[killed] = f"worker {killed} (killed)"
    drawn = Timeline(_seconds(run.started), _seconds(run.ended), order=[names[process] for process in sorted(names)])
    for grant in run.grants:
        until = run.held_until(grant)
        # Looks at a sold-out product are too short to be seen.
        if until is not None and (grant.item or grant.released is None):
            drawn.turns.append(_turn(run, grant, names[grant.process], until))
    if run.kill is not None:
        at, product = run.kill.at, run.kill.product
        told = f"worker {killed} killed (SIGKILL) at {(at - run.started) / MS:,.0f} ms while it holds product {product}"
        drawn.marks.append(Mark(_seconds(at), "", told))
    title = "Who held which lock, and when" if run.locked else "Who sold what, and when"
    return svg(drawn, title=title, subtitle=subtitle, by="name")


def _turn(run: Run, grant: ReportedGrant, process: str, until: int) -> Turn:
    turn = Turn(
        f"product {grant.product}", process, _seconds(grant.asked), _seconds(grant.got), _seconds(until), "released",
        task=f"task {grant.task}", fence=grant.fence or None, contended=False,
    )  # fmt: skip
    orphan = run.orphans.get(grant.product)
    if orphan is not None and run.kill is not None and orphan.fence == grant.fence and grant.released is None:
        again = min(orphan.next or orphan.ends, run.ended)
        turn.outcome, turn.until = "killed", _seconds(again)
        if grant.product == run.kill.product and orphan.next is not None:
            turn.note = f"granted again after {(again - run.kill.at) / MS:,.0f} ms"
    return turn


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9
