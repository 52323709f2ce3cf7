"""What the doctor says of a server, as --json prints it."""

from __future__ import annotations

from typing import Any

from .programs import printed_json

CODES = {"warn": 1, "bad": 2}
"""Exit codes."""


def examine(url: str, *words: str, **env: str) -> list[dict[str, Any]]:
    """Return all findings."""
    found: list[dict[str, Any]] = printed_json("doctor", "--url", url, *words, expect=(0, 1, 2), **env)["findings"]
    return found


def told(url: str, level: str, check: str, *words: str, **env: str) -> str:
    """Return what the doctor found of ``check``: one finding, of that level, with its meaning and a remedy."""
    report = printed_json("doctor", "--url", url, *words, expect=(CODES[level], 2), **env)
    found = [one for one in report["findings"] if one["check"] == check and one["level"] == level]
    assert found, report
    assert found[0]["meaning"].endswith(".")
    assert found[0]["fix"]
    return str(found[0]["found"])


def levels(found: list[dict[str, Any]]) -> dict[str, str]:
    return {one["check"]: one["level"] for one in found}
