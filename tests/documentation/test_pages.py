"""Every block of code in the documentation runs, or says why it does not."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path

import pytest
import redis as blocking

from redis_sync_aio.embedded import EmbeddedServer

from ..support.embedded import alive, eventually
from .pages import Page, without_their_imports

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AT_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md")
MAINTAINERS = ROOT / "maintainers"
ALL = [*DOCS.rglob("*.md"), *MAINTAINERS.glob("*.md"), *(ROOT / name for name in AT_THE_ROOT)]
PAGES = sorted(ALL) if DOCS.exists() else []
PROGRAMS = {
    "api-in-one-page.md",
    "index.md",
    "CONTRIBUTING.md",
    "benchmarks.md",
    "tutorial.md",
    "operations/command-line.md",
    "operations/index.md",
    "operations/managed-services.md",
    "operations/servers.md",
    "operations/tracing.md",
    "guides/jobs.md",
    "guides/leader-election.md",
    "guides/testing.md",
    "recipes/aiohttp.md",
    "recipes/django.md",
    "recipes/fastapi.md",
    "recipes/sigterm.md",
    "recipes/starlette.md",
}
"""Pages whose commands take seconds."""
LOGGED = re.compile(
    r"the lease on '.*' \(fence \d+\) was lost after|redis_sync_aio (has had no connection|is connected) to"
    r"|the renewal of the lease on '.*' came [\d.]+ seconds late"
    r"|POST /: LeaseLost: "
)
"""What the log may say: some programs lose a lease on purpose, or stop their server, and a machine may stall."""

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the documentation is not next to these tests")


def name_of(page: Path) -> str:
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


WORDS_OF_ONE_PAGE = 600


def test_the_api_in_one_page_is_one_page() -> None:
    """Two tables, and what a reader can keep in mind. Its code counts, too."""
    text = (DOCS / "api-in-one-page.md").read_text("utf-8").split("---\n", 2)[2]
    text = re.sub("<!--.*?-->", "", text, flags=re.S)
    assert len(text.split()) <= WORDS_OF_ONE_PAGE
    assert text.count("\n|---") == 2


def each(pages: list[Path]) -> list[object]:
    return [
        pytest.param(page, id=name_of(page), marks=pytest.mark.ci if name_of(page) in PROGRAMS else ())
        for page in pages
    ]


@pytest.mark.parametrize("page", each(PAGES))
def test_every_block_of_a_page_runs(
    page: Path, server: EmbeddedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.Redis.from_url(server.url) as client:
        client.flushall()
    with caplog.at_level(logging.WARNING, "redis_sync_aio"):
        Page(page, server.url, tmp_path).run()
        gc.collect()  # what is still open is blamed on this page
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("redis_sync_aio")]
    assert not [line for line in logged if not LOGGED.match(line)]


@pytest.mark.parametrize("page", each(PAGES))
def test_every_block_of_a_page_imports_what_it_uses(page: Path) -> None:
    assert without_their_imports(page) == []


def test_whatever_does_not_run_says_why() -> None:
    """A comment that leaves a block out has a sentence as its reason."""
    comments = [(page, found) for page in PAGES for found in re.findall(r"<!--+ *skip: ?(.*?)--+>", page.read_text())]
    assert [
        (page, found) for page, found in comments if not re.fullmatch(r'(next|start|end), "[^"]{8,}\." |end ', found)
    ] == []


def test_files_are_put_in_as_the_site_reads_it() -> None:
    """The formatter takes the line for an expression in a block of Python, and spaces it: such blocks say .python."""
    lines = [
        (page.name, line)
        for page in PAGES
        for line in page.read_text("utf-8").splitlines()
        if "8<" in line or "8 <" in line
    ]
    put_in = re.compile(r' *--8<-- "([^":]+)(?::(\w+))?"')
    marks = re.compile(r"<!-- --8<-- \[(?:start|end):\w+\] -->")
    found = [(page, line, put_in.fullmatch(line)) for page, line in lines if not marks.fullmatch(line)]
    assert found
    assert [(page, line) for page, line, it in found if not it or not (ROOT / it[1]).is_file()] == []
    parts = [(ROOT / it[1], it[2]) for _, _, it in found if it and it[2]]
    assert [it for it in parts if f"[start:{it[1]}]" not in it[0].read_text("utf-8")] == []


def test_a_block_that_fails_is_noticed(server: EmbeddedServer, tmp_path: Path) -> None:
    """And the traceback shows the line of the page."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        Page(page, server.url, tmp_path).run()
    assert caught.traceback[-1].lineno == 7
    for block, said in {
        "sh\nfalse\n": "line 3: exit status 1",
        "lua\nlocal copied = 1\n": "not put in from a file",
        'lua\n--8<-- "no/such.lua"\n': "there is no no/such",
        "cobol\n": "no way to run 'cobol'",
    }.items():
        page.write_text(f"# Title\n\n```{block}```\n")
        with pytest.raises(AssertionError, match=said):
            Page(page, server.url, tmp_path).run()


def test_a_file_may_be_written_in_steps(server: EmbeddedServer, tmp_path: Path) -> None:
    """What imports it sees the latest version."""
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="step.py"\nN = 1\n```\n\n```python\nimport step\n```\n\n'
        '```python title="step.py"\nN = 2  # later\n```\n\n```python\nimport step\n\nassert step.N == 2\n```\n'
    )
    Page(page, server.url, tmp_path).run()


def test_what_a_block_leaves_running_is_killed(server: EmbeddedServer, tmp_path: Path) -> None:
    """Also what holds its output open. The block is not waited for any longer."""
    page = tmp_path / "page.md"
    page.write_text("```sh\nsleep 600 &\necho $! > pid\n```\n")
    Page(page, server.url, tmp_path).run()
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not alive(pid))
