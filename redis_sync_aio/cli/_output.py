"""The output of commands: text for people, JSON for programs, errors in one line on stderr."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TextIO

from rich.console import Console

NAME = "redis-sync-aio"


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 name" or "2 names"; ``many`` is the word for several if that is not ``one`` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Output:
    """Standard output in the way that the options ask for."""

    def __init__(self, *, as_json: bool = False, color: bool = True) -> None:
        self.as_json = as_json
        self.console = console(color=color)
        """For text; it has no colours when the output is no terminal."""

    def json(self, value: object) -> None:
        """Print a value as one JSON document in one line."""
        sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()

    def show(self, value: object, text: Callable[[Console], None]) -> None:
        """Print ``value`` with --json, else whatever ``text`` prints."""
        if self.as_json:
            self.json(value)
        else:
            text(self.console)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, which `end_output` is for; rich would end the program with a code of its own."""
        raise BrokenPipeError


def console(*, color: bool = True, file: IO[str] | None = None) -> Console:
    """Return a console without markup or colours of its own making; NO_COLOR is heeded."""
    return _Console(file=file, highlight=False, no_color=None if color and not os.environ.get("NO_COLOR") else True)


def end_output(stream: TextIO) -> None:
    """Print nothing more there: whatever read the output has closed it."""
    with suppress(OSError):  # the interpreter flushes again in the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_error(text: str) -> None:
    """Print on stderr, if anything reads it: a command goes on, and has its own exit code, in any case."""
    try:
        print(_without_secrets(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        end_output(sys.stderr)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print_error(f"{NAME}: {' '.join(message.split())}")


def print_traceback(error: BaseException) -> None:
    """Print what --debug promises."""
    print_error("".join(traceback.format_exception(error)).rstrip("\n"))


_secrets: set[str] = set()


def keep_secret(*values: str | None) -> None:
    """Never print these: libraries may quote them in errors."""
    _secrets.update(value for value in values if value)


def _without_secrets(text: str) -> str:
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
