"""The check of what is published notices what should not be there, what is missing, and builds that differ."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "package.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="only a checkout has the gate")
INFO = "redis_sync_aio-1.dist-info"


@pytest.fixture(scope="module")
def checks() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def wheel(checks: dict[str, Any]) -> dict[str, bytes]:
    info = {f"{INFO}/{name}" for name in checks["DIST_INFO"]}
    code = {"redis_sync_aio/__init__.py", "redis_sync_aio/_scripts/lock/acquire.lua", "redis_sync_aio_pytest.py"}
    return dict.fromkeys(info | code | checks["DATA"], b"")


def sdist(checks: dict[str, Any]) -> dict[str, bytes]:
    return dict.fromkeys(checks["SDIST"] | {"redis_sync_aio/__init__.py", "tests/unit/test_errors.py"}, b"")


@pytest.mark.parametrize(
    "stray",
    [
        "tests/unit/test_errors.py",
        "redis_sync_aio/notes.txt",
        "redis_sync_aio/__pycache__/lock.cpython-311.pyc",
        f"{INFO}/licenses/OTHER",
        "redis_sync_aio/new.py",
    ],
)
def test_a_wheel_has_the_package_and_nothing_else(checks: dict[str, Any], stray: str) -> None:
    files = wheel(checks)
    committed = {name for name in files if INFO not in name}
    assert list(checks["wheel_problems"](files, committed)) == []
    assert list(checks["wheel_problems"](files | {stray: b""}, committed))
    for name in files:
        assert list(checks["wheel_problems"]({key: b"" for key in files if key != name}, committed)), name


@pytest.mark.parametrize("stray", ["site/index.html", ".ci/run", "tests/__pycache__/x.pyc", ".env", "notes.md"])
def test_an_sdist_has_what_its_tests_need_and_no_leftovers(checks: dict[str, Any], stray: str) -> None:
    files = sdist(checks)
    assert list(checks["sdist_problems"](files, set(files))) == []
    assert list(checks["sdist_problems"](files | {stray: b""}, set(files))) == [f"the sdist has {stray}"]
    for name in files:
        assert list(checks["sdist_problems"]({key: b"" for key in files if key != name}, set(files))), name


def test_builds_that_differ_are_found_out(checks: dict[str, Any], tmp_path: Path) -> None:
    def build(folder: str, content: str, year: int = 2020) -> Path:
        path = tmp_path / folder / "x-1-py3-none-any.whl"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("x.py", (year, 1, 1, 0, 0, 0)), content)
        return path

    one = build("a", "1")
    assert checks["same"](one, build("b", "1")) == []
    assert checks["same"](one, build("c", "2")) == ["x.py differs"]
    assert "times" in checks["same"](one, build("d", "1", year=2021))[0]
