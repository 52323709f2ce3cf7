"""The command ``redis-sync-aio``. It needs the extra ``[cli]``; the library itself does not.

`_app` has the commands, one module or folder for each. `_session` declares the options that all of them have, connects
with these, words errors, and ends the program.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Says what to install when typer or rich are missing."""
    try:
        # Not on top: without the extra, the import fails, and the message says what to install.
        from ._app import app
        from ._session import BUG, NAME, USAGE, complain, print_traceback
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"redis-sync-aio needs {missing}: run  pip install 'redis_sync_aio[cli]'")
    try:
        code = app(prog_name=NAME, standalone_mode=False)
    except Exception as error:
        if "--debug" in sys.argv:
            print_traceback(error)
        if not (describe := getattr(error, "format_message", None)):
            complain(f"unexpected {type(error).__name__}: {error}. This is a bug: please report what --debug prints")
            sys.exit(BUG)
        if message := describe():  # of wrong usage; empty if help was printed, as nothing was asked
            path = getattr(getattr(error, "ctx", None), "command_path", NAME)
            hint = "Write -- before COMMAND, or try" if path.endswith(" run") and "--" not in sys.argv else "Try"
            message = message.replace("Value error, ", "", 1)  # of typer
            complain(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} {hint} '{path} --help'")
        code = USAGE
    sys.exit(code or 0)
