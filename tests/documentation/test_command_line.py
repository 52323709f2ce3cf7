"""docs/operations/command-line.md has each command, option and exit code of the program, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from redis_sync_aio.cli._app import EXITS, app
from redis_sync_aio.cli._session import COMMON_EXITS

PAGE = (Path(__file__).parents[2] / "docs" / "operations" / "command-line.md").read_text("utf-8")
GROUP: Any = typer.main.get_command(app)
COMMON = "Common options"
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"(?m)^## ", PAGE)[1:]}
ALONE = {"demo"}
"""Commands without the common options and exit codes."""


def options(name: str) -> set[str]:
    """The options of a command, each with all its spellings."""
    found = {option for one in GROUP.commands[name].params for option in (*one.opts, *one.secondary_opts)}
    return {option for option in found if option.startswith("-")} - {"--help", "-h"}


def first_cells(section: str) -> list[str]:
    return re.findall(r"(?m)^\| (`.*?) \|", SECTIONS[section])


def documented_options(section: str) -> set[str]:
    return {option for cell in first_cells(section) for option in re.findall(r"`(--?[\w-]+)`", cell)}


def documented_exits(section: str) -> dict[int, str]:
    return {int(code): meaning for code, meaning in re.findall(r"(?m)^\| `(\d+)` \| (.*) \|$", SECTIONS[section])}


def test_each_command_has_a_section() -> None:
    assert set(GROUP.commands) == set(SECTIONS) - {COMMON, "Exit codes"}


@pytest.mark.parametrize("name", GROUP.commands)
def test_options(name: str) -> None:
    common = set() if name in ALONE else documented_options(COMMON)
    assert documented_options(name) | common == options(name)
    assert not documented_options(name) & common


@pytest.mark.parametrize("name", GROUP.commands)
def test_exit_codes(name: str) -> None:
    common = {} if name in ALONE else documented_exits("Exit codes")
    assert common in ({}, COMMON_EXITS)
    assert common | documented_exits(name) == EXITS[name]
