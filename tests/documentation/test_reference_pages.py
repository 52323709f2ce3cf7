"""The reference has every public name once, and no other."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

import redis_sync_aio

PAGES = Path(__file__).parents[2] / "docs" / "reference"
MODULES = (
    "coordinator",
    "embedded",
    "inspection",
    "instrumentation",
    "jobs",
    "testing",
    "tracing",
    "types",
    "compat",
    *(f"contrib.{name}" for name in ("aiohttp", "asgi", "fastapi", "otel", "prometheus")),
)
pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="the documentation is not next to these tests")


def listed() -> list[str]:
    texts = [page.read_text("utf-8") for page in PAGES.glob("*.md")]
    return [name for text in texts for name in re.findall(r"^::: redis_sync_aio\.([\w.]+)$", text, re.M)]


def test_nothing_is_listed_twice() -> None:
    assert [name for name, times in Counter(listed()).items() if times > 1] == []


def test_every_public_name_is_listed() -> None:
    """A name that several modules export has one entry."""
    short = {name.rpartition(".")[2] for name in listed()}
    modules = [importlib.import_module(f"redis_sync_aio.{name}") for name in MODULES]
    public = {name for module in (redis_sync_aio, *modules) for name in module.__all__}
    assert public - short == set()


def test_every_entry_is_public() -> None:
    for name in listed():
        module, _, last = name.rpartition(".")
        assert last in importlib.import_module(f"redis_sync_aio.{module}".rstrip(".")).__all__, name
