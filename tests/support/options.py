"""The options of the suite: `python -m pytest --help` lists them under "redis_sync_aio".

Fixtures and tests read them from `OPTIONS`; so do modules that are collected, because pytest has read its command line
when collection starts. Programs that tests start see the defaults.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from typing import Literal

import pytest

Topology = Literal["direct", "sentinel", "shards"]
Engine = Literal["auto", "watch"]


@dataclass
class Options:
    """What pytest was asked for: `chaos_seconds` is the option ``--chaos-seconds``."""

    run_ci: bool = False
    pairs: bool = False
    part: tuple[int, int] = (0, 1)
    topology: Topology = "direct"
    schedules: int | None = None
    schedule: int | None = None
    comparisons: int | None = None
    comparisons_seed: int = 1
    scale: int = 1
    chaos_seconds: float = 4
    chaos_seed: int | None = None
    chaos_share: bool = False
    chaos_engine: Engine = "auto"


OPTIONS = Options()


def add_options(parser: pytest.Parser) -> None:
    """Tell pytest of the options."""
    add = parser.getgroup("redis_sync_aio").addoption
    add("--run-ci", action="store_true", help="run tests marked ci and every combination of parameters, too")
    add("--pairs", action="store_true", help="run each pair of values of parameters, not only each value")
    add(
        "--part",
        type=read_part,
        metavar="K/N",
        default="0/1",
        help="run part K of N of the tests, chosen by their names",
    )
    add("--topology", default="direct", choices=("direct", "sentinel", "shards"), help="of tests/conformance")
    add("--schedules", type=int, metavar="N", help="random schedules of each subject (with --run-ci: 2000)")
    add("--schedule", type=int, metavar="SEED", help="run and print this one random schedule")
    add("--comparisons", type=int, metavar="N", help="sequences compared with redis-py: 60 (with --run-ci: 3000)")
    add("--comparisons-seed", type=int, metavar="SEED", default=1, help="seed of these sequences")
    add("--scale", type=int, metavar="N", default=1, help="try N times as much at random; before a release 60")
    add("--chaos-seconds", type=float, metavar="SECONDS", default=4, help="how long each kind of chaos lasts: 4")
    add("--chaos-seed", type=int, metavar="SEED", help="seed of the chaos: random")
    add("--chaos-share", action="store_true", help="chaos among tasks that share what their process holds")
    add("--chaos-engine", default="auto", choices=("auto", "watch"), help="chaos with scripts, or without them")


def read_part(text: str) -> tuple[int, int]:
    """Read "7/5" as part 2 of 5: the first number may be any, such as one that a commit has."""
    number, _, parts = text.partition("/")
    return int(number) % int(parts), int(parts)


def read_options(config: pytest.Config) -> None:
    """Note what pytest was asked for."""
    for option in fields(Options):
        setattr(OPTIONS, option.name, config.getoption(option.name))
    if OPTIONS.run_ci:
        OPTIONS.schedules = OPTIONS.schedules or 2000
        OPTIONS.comparisons = OPTIONS.comparisons or 3000
    if OPTIONS.chaos_seed is None:
        OPTIONS.chaos_seed = secrets.randbelow(10**6)
