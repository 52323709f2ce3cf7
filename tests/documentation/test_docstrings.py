"""Every example in a docstring of a class or a function of the package runs."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as blocking
from redis.asyncio import Redis
from sybil import Document

import redis_sync_aio
from redis_sync_aio import AsyncLock, AsyncReadWriteLock, Coordinator, LeaderElection
from redis_sync_aio.embedded import EmbeddedServer

from .pages import Page

PACKAGE = Path(redis_sync_aio.__file__).parent


def documented() -> Iterator[tuple[str, Path, int, str]]:
    """Yield what has an example: its name, its file, the line where its docstring begins, and the docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if "```" in source else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text and "```" in text:
                    yield f"{path.stem}.{node.name}", path, node.body[0].lineno, text


DOCUMENTED = list(documented())
OF_SERVERS = {"servers"}
"""Those that start several servers."""


async def nothing(*args: object, **options: object) -> int:
    """Stand for what the example's application does."""
    return 100


class Service:
    """Stands for a service that the example calls: it has every method."""

    def __getattr__(self, name: str) -> object:
        return nothing


FUNCTIONS = (
    "balance book charge finish_or_undo infer load refund render report restock schedule store take_from_stock train "
    "transfer write_order"
)
"""What examples call without defining it."""


def given(url: str) -> dict[str, object]:
    """Return what examples of docstrings may use without defining it."""
    redis = Redis.from_url(url)
    return {
        **dict.fromkeys(FUNCTIONS.split(), nothing),
        "order_id": 7,
        "bucket": Service(),
        "payments": Service(),
        "redis": redis,
        "sync": Coordinator(redis),
        "lock": AsyncLock(redis, "orders:42"),
        "rw": AsyncReadWriteLock(redis, "config"),
        "election": LeaderElection(redis, "scheduler"),
    }


def of_file(path: Path) -> list[tuple[str, int, str]]:
    return [(name, line, text) for name, where, line, text in DOCUMENTED if where == path]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.ci if path.stem in OF_SERVERS else ())
        for path in sorted({path for _, path, *_ in DOCUMENTED})
    ],
)
def test_the_examples_of_the_docstrings_of_a_file_run(path: Path, server: EmbeddedServer, tmp_path: Path) -> None:
    for name, line, text in of_file(path):
        with blocking.Redis.from_url(server.url) as client:
            client.flushall()
        page = Page(Document("\n" * (line - 1) + text, str(path)), server.url, tmp_path, given(server.url))
        page.run()
        assert page.ran, name
    gc.collect()  # what is still open is blamed on this file
