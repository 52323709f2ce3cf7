"""The error for an integration whose library is not installed: it says what to install."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, module: str, install: str) -> ModuleNotFoundError:
    """Return the error for the import of ``module``, which needs the package that ``error`` names.

    ``install``: what to give to pip.
    """
    needed = (error.name or "").partition(".")[0]
    return ModuleNotFoundError(f"{module} needs {needed}: run  pip install '{install}'", name=error.name)
