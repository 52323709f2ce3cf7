"""The command ``redis-sync-aio``. It needs the extra ``[demo]``; the library itself does not."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Says what to install when typer or rich are missing."""
    try:
        # Not on top: worker processes import this package too, and need neither typer nor rich.
        from .demo import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"redis-sync-aio needs {missing}: run  pip install 'redis_sync_aio[demo]'")
    app(prog_name="redis-sync-aio")
