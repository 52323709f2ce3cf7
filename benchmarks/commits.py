"""``python -m benchmarks.commits COMMIT ...``: the cost of a pair here, in turn with other commits of this repository.

Each program of `pairs_program` runs in a process of its own, next to the package of each commit and of the working tree
in turn, several times over. Figures are medians in microseconds a pair: CPU of the client, CPU of the server, time.
The ratios of one run can be trusted, the absolutes cannot: machines differ, and have phases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from redis_sync_aio.embedded import EmbeddedServer

from .pairs_program import PROGRAMS

HERE = Path(__file__).resolve().parent
TREE = "this tree"
FIGURES = ("client", "server", "time")
OF_PEERS = ("redis-py", "asyncio")
"""The beginnings of programs that do not use the package: they run with this tree only."""
Found: TypeAlias = dict[tuple[str, str], dict[str, float]]
"""By program and version: the median of each figure."""


def exported(commit: str, into: Path) -> Path:
    """Write the package of a commit below ``into``; return the directory to import it from."""
    path = into / commit.replace("/", "_")
    path.mkdir()
    archive = subprocess.run(
        ("git", "archive", commit, "redis_sync_aio"), cwd=HERE.parent, check=True, stdout=subprocess.PIPE
    )
    subprocess.run(("tar", "-x", "-C", str(path)), input=archive.stdout, check=True)
    return path


def played(url: str, package: Path, program: str, seconds: float) -> Mapping[str, float]:
    """Run a program once; return its figures."""
    done = subprocess.run(
        (sys.executable, "-P", str(HERE / "pairs_program.py"), url, program, str(seconds), str(package)),
        env={**os.environ, "PYTHONPATH": str(package)},
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(packages: Mapping[str, Path], programs: Sequence[str], rounds: int, seconds: float) -> Found:
    """Return the medians; each round begins with another version."""
    all_rounds = dict[tuple[str, str], list[Mapping[str, float]]]()
    with EmbeddedServer() as server, Console(stderr=True).status("") as status:
        for number in range(rounds):
            for program in programs:
                names = [TREE] if program.startswith(OF_PEERS) else list(packages)
                shift = number % len(names)
                for name in names[shift:] + names[:shift]:
                    status.update(f"round {number + 1} of {rounds}: {program}, {name}")
                    figures = played(server.url, packages[name], program, seconds)
                    all_rounds.setdefault((program, name), []).append(figures)
    return {
        place: {figure: median(one[figure] for one in figures) for figure in FIGURES}
        for place, figures in all_rounds.items()
    }


def table(found: Found, versions: Sequence[str]) -> str:
    """Return a table of Markdown: the figures of each version, and in parentheses the ratio of this tree's to them."""
    lines = [f"| µs a pair: client, server, time | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    for program in dict.fromkeys(program for program, _ in found):
        tree = found[program, TREE]
        cells = []
        for version in versions:
            if (figures := found.get((program, version))) is None:
                cells.append("")
                continue
            cell = ", ".join(f"{figures[figure]:.1f}" for figure in FIGURES)
            ratios = ", ".join(f"{tree[figure] / (figures[figure] or 1):.2f}" for figure in FIGURES)
            cells.append(cell if version == TREE else f"{cell} ({ratios})")
        lines.append(f"| {program} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    commits: Annotated[list[str], typer.Argument(help="Commits to compare this tree with.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each program and version.")] = 5,
    seconds: Annotated[float, typer.Option(help="Measured time of each.")] = 0.5,
    only: Annotated[str, typer.Option(help="Programs, separated by commas.")] = ",".join(PROGRAMS),
) -> None:
    """Print what a pair costs here and at other commits; in parentheses this tree's figures over theirs."""
    programs = [program for program in PROGRAMS if program in only.split(",")]
    with tempfile.TemporaryDirectory() as place:
        packages = {commit: exported(commit, Path(place)) for commit in commits}
        packages[TREE] = HERE.parent
        found = measured(packages, programs, rounds, seconds)
    print(table(found, list(packages)))


if __name__ == "__main__":
    typer.run(main)
