"""Integrations with other libraries. Each module needs a package of its own, named by an extra."""

from __future__ import annotations

__all__: list[str] = []


def missing(error: ModuleNotFoundError, module: str, install: str) -> ModuleNotFoundError:
    """Return the error for the import of ``module``, which needs the package that ``error`` names.

    ``install``: what to give to pip.
    """
    needed = (error.name or "").partition(".")[0]
    return ModuleNotFoundError(f"{module} needs {needed}: run  pip install '{install}'", name=error.name)
