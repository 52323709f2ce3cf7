"""docs/operations/command-line.md has each command, and puts in its options and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from redis_sync_aio.cli._app import EXITS

from .commands import ALONE, GROUP, WRITTEN, reference

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "command-line.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def test_each_command_has_a_section() -> None:
    sections = set(re.findall(r"(?m)^## (.*)", PAGE.read_text("utf-8")))
    assert set(GROUP.commands) == sections - {"The address", "Options and exit codes"}


def test_the_options_and_exit_codes_are_those_of_the_program() -> None:
    """After a change: ``python -m tests.documentation.commands``."""
    assert WRITTEN.read_text("utf-8") == reference()
    assert f'--8<-- "docs/assets/{WRITTEN.name}"' in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", GROUP.commands)
def test_each_option_and_each_exit_code_is_in_the_reference(name: str) -> None:
    common, *parts = re.split(r"(?m)^\*\*(?=`\w+`\*\*$)", reference())
    own = next(part for part in parts if part.startswith(f"`{name}`"))
    text = own if name == ALONE else common + own
    options = {option for one in GROUP.commands[name].params for option in (*one.opts, *one.secondary_opts)}
    assert {option for option in options if option.startswith("-")} == set(re.findall(r"`(--?[\w-]+)`", text))
    assert {int(code) for code in re.findall(r"(?m)^\| `(\d+)` ", text)} == set(EXITS[name])
