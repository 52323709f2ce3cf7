"""The linter of the Lua scripts finds what it is for, and the scripts pass it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("luaparser", reason="it comes with the group lint")

from redis_sync_aio._scripts import Line, lines
from redis_sync_aio._scripts.constants import put_in

from ..support import lua_lint

WRONG = {
    "return redis.call('GET', NAEM)": "undefined global 'NAEM'",
    "holder = redis.call('GET', KEYS[1])": "undefined global 'holder'",
    "local function f() found = 1 end return f": "undefined global 'found'",
    "return string.fmt('%d', 1)": "undefined function 'string.fmt'",
    "return redis.log(1)": "undefined function 'redis.log'",
    "return {Outcome.QUEUD}": "undefined global 'Outcome'",
    "local left = 1": "unused local 'left'",
    "local a, b = 1, 2": "unused local 'a'",
    "local a = 1 a = 2": "unused local 'a'",
    "if KEYS[1] then local left = 1 elseif ARGV[1] then return 1 end": "unused local 'left'",
    "local function f() end": "unused function 'f'",
    "local function f(a) end return f": "unused parameter 'a'",
    "return function(a) end": "unused parameter 'a'",
    "for i, key in ipairs(KEYS) do end": "unused loop variable 'i'",
    "for i = 1, 2 do end": "unused loop variable 'i'",
    "local a = 1 local a = 2 return a": "'a' hides another local of its block",
    "function f() end": "a function that is not local",
}
RIGHT = (
    "local code, text = 1, 2 return text",  # they came together
    "for _, key in ipairs(KEYS) do redis.call('DEL', key) end",
    "local found = {} found.x = 1",
    "local found = {err = 1} return found.err",
    "local a repeat a = redis.call('GET', KEYS[1]) until a",
    "repeat local a = redis.call('GET', KEYS[1]) until a",
    "local a = 1 local function f() local a = 2 return a end return a + f()",
    "return Outcome.QUEUED",
)


def check(source: str) -> list[str]:
    """Lint one line, with its constants in place."""
    return list(lua_lint.check([Line("test.lua", 1, put_in(source))]))


@pytest.mark.parametrize("source", WRONG)
def test_a_planted_fault_is_found(source: str) -> None:
    assert f"test.lua:1: {WRONG[source]}" in check(source)


@pytest.mark.parametrize("source", RIGHT)
def test_nothing_else_is_found(source: str) -> None:
    assert check(source) == []


def test_a_fault_is_found_in_the_included_file() -> None:
    """It is reported where it stands, not where the script has it after its includes are in place."""
    script = list(lines("lock/renew"))
    planted = next(i for i, line in enumerate(script) if line.path == "include/lock_extend.lua" and line.number == 5)
    script.insert(planted, Line("include/lock_extend.lua", 5, "local planted = 1"))
    assert list(lua_lint.check(script)) == ["include/lock_extend.lua:5: unused local 'planted'"]


def test_long_lines_spaces_at_the_end_and_numbers_that_have_a_name_are_found(tmp_path: Path) -> None:
    (file := tmp_path / "part.lua").write_text("return 1 \n--" + 99 * "x" + "\nreturn {2, 1}\nkeep(600000)\n")
    assert [finding.split(":", 1)[1] for finding in lua_lint.check_file(file)] == [
        "1: a space at the end",
        "2: longer than 100 columns",
        "3: a code without a name: see constants.py",
        "4: write QUEUE_TTL_MS for 600000",
    ]


def test_the_scripts_pass() -> None:
    assert lua_lint.main() == 0
