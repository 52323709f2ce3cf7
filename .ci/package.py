"""Check the files that are published: an sdist and a wheel.

    python .ci/package.py contents DIRECTORY     # what is in them, and their metadata
    python .ci/package.py same FILE FILE         # two builds of one file are equal, byte by byte
    python .ci/package.py statements DIRECTORY   # what an attestation of each would state

Needs .ci/package.txt.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "redis_sync_aio"
SITE = "https://redis-sync-aio.github.io/redis-sync-aio/"
SUFFIXES = {".py", ".lua"}
DATA = {f"{PACKAGE}/py.typed", f"{PACKAGE}/contrib/dashboard.json"}
DIST_INFO = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
SDIST = {
    *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("pyproject.toml", "zensical.toml", "PKG-INFO", ".gitignore", f"{PACKAGE}_pytest.py"),
}
FOLDERS = {PACKAGE, "tests", "examples", "benchmarks", "docs", "maintainers", "overrides"}
CACHES = re.compile(r"__pycache__|\.py[co]$|\.egg-info|(^|/)(\.(?!gitignore)|site/|out/)")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
URLS = ("Homepage", "Documentation", "Changelog", "Source", "Issues")


def members(path: Path) -> dict[str, bytes]:
    """Return the files in an archive by their names; for an sdist without its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    found = {}
    with tarfile.open(path) as sdist:
        for member in sdist:
            content = sdist.extractfile(member)
            if content is not None:
                found[str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))] = content.read()
    return found


def committed() -> set[str]:
    """Return the files of the repository; none where there is no git."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines()) if done.returncode == 0 else set()


def wheel_problems(files: Mapping[str, bytes], source: set[str]) -> Iterator[str]:
    """Yield what a wheel should not have, and what it lacks. ``source``: the files of the repository."""
    info = {name for name in files if ".dist-info/" in name}
    if (found := {name.split("/", 1)[1] for name in info}) != DIST_INFO:
        yield f"the wheel's dist-info has {sorted(found)}, not {sorted(DIST_INFO)}"
    code = set(files) - info
    for name in sorted(code):
        known = name in DATA or name == f"{PACKAGE}_pytest.py" or PurePosixPath(name).suffix in SUFFIXES
        if not known or CACHES.search(name) or not name.startswith(PACKAGE):
            yield f"the wheel has {name}"
    yield from (f"the wheel lacks {name}" for name in sorted(DATA - code))
    if source:
        expected = {name for name in source if name.startswith((f"{PACKAGE}/", f"{PACKAGE}_pytest.py"))}
        yield from (f"the wheel lacks {name}" for name in sorted(expected - code))
        yield from (f"the wheel has {name}, which is not committed" for name in sorted(code - expected))


def sdist_problems(files: Mapping[str, bytes], source: set[str]) -> Iterator[str]:
    """Yield what an sdist should not have, and what it lacks. ``source``: the files of the repository."""
    yield from (f"the sdist lacks {name}" for name in sorted(SDIST - set(files)))
    for name in sorted(files):
        top = name.partition("/")[0]
        if CACHES.search(name) or (top not in FOLDERS and name not in SDIST):
            yield f"the sdist has {name}"
    if source:
        expected = {name for name in source if name.partition("/")[0] in FOLDERS}
        yield from (f"the sdist lacks {name}" for name in sorted(expected - set(files)))


def metadata_problems(text: bytes) -> Iterator[str]:
    """Yield what is wrong with the metadata, and with the description as an index shows it."""
    from packaging.metadata import Metadata
    from trove_classifiers import classifiers

    found = Metadata.from_email(text, validate=True)
    if found.license_expression != "MIT" or list(found.license_files or ()) != ["LICENSE"]:
        yield f"the licence is {found.license_expression!r}, in {found.license_files}"
    if str(found.requires_python) != f">={PYTHONS[0]}":
        yield f"it needs Python {found.requires_python}"
    named = found.classifiers or []
    yield from (f"unknown classifier {name!r}" for name in named if name not in classifiers)
    versions = tuple(name.rpartition(" ")[2] for name in named if re.search(r":: 3\.\d+$", name))
    if versions != PYTHONS:
        yield f"the classifiers name Python {versions}, not {PYTHONS}"
    if "Typing :: Typed" not in named:
        yield "no classifier says that it is typed"
    urls = found.project_urls or {}
    yield from (f"no URL {name}" for name in URLS if name not in urls)
    if urls.get("Documentation") != SITE:
        yield f"the URL Documentation is {urls.get('Documentation')}, not {SITE}"
    yield from (f"the URL {name} does not begin with https" for name, url in urls.items() if url[:8] != "https://")
    if not found.keywords or not found.summary:
        yield "there are no keywords, or no summary"
    if found.description_content_type != "text/markdown":
        yield f"the description is {found.description_content_type}"
    relative = re.findall(r"\]\((?!https?://|#|mailto:)([^)]*)\)", found.description or "")
    yield from (f"the description has the relative link {link}, which leads nowhere on an index" for link in relative)


def published(directory: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel in a directory that has one of each, and nothing else."""
    [sdist], [wheel] = directory.glob("*.tar.gz"), directory.glob("*.whl")
    if len(list(directory.iterdir())) != 2:
        raise SystemExit(f"{directory} has more than an sdist and a wheel")
    return sdist, wheel


def contents(directory: Path) -> list[str]:
    """Return what is wrong with an sdist and a wheel."""
    sdist, wheel = published(directory)
    source, inside = committed(), members(wheel)
    found = [*sdist_problems(members(sdist), source), *wheel_problems(inside, source)]
    metadata = next(content for name, content in inside.items() if name.endswith(".dist-info/METADATA"))
    found += metadata_problems(metadata)
    if members(sdist)["PKG-INFO"] != metadata:
        found.append("sdist and wheel have different metadata")
    return found


def same(one: Path, other: Path) -> list[str]:
    """Return the differences of two builds of one file."""
    if one.name == other.name and one.read_bytes() == other.read_bytes():
        return []
    mine, theirs = members(one), members(other)
    found = [f"{name} is in one of them only" for name in sorted(set(mine) ^ set(theirs))]
    found += [f"{name} differs" for name in sorted(set(mine) & set(theirs)) if mine[name] != theirs[name]]
    return found or [f"{one.name} and {other.name} have the same files, and differ in names, times or modes"]


def statements(directory: Path) -> list[str]:
    """Return what is wrong with the statements that attestations of these files would sign.

    The library makes them. It cannot go further without an identity: the forge gives that to a running workflow only.
    """
    from pypi_attestations import Attestation, AttestationType, Distribution

    class NoIdentity(Exception):
        """There is nothing to sign with."""

    class Signer:
        def sign_dsse(self, statement: Any) -> None:
            self.statement = json.loads(statement._contents)
            raise NoIdentity

    found = []
    for path in published(directory):
        signer = Signer()
        try:
            Attestation.sign(signer, Distribution.from_file(path))
        except NoIdentity:
            pass
        expected = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}],
            "predicateType": AttestationType.PYPI_PUBLISH_V1.value,
        }
        stated = {name: value for name, value in signer.statement.items() if value is not None}
        if stated != expected:
            found.append(f"{path.name}: the statement is {stated}, not {expected}")
        else:
            print(f"{path.name}: sha256 {expected['subject'][0]['digest']['sha256']}, stated, not signed")
    return found


def main(command: str, *paths: str) -> int:
    """Run a command, print what is wrong, and return the exit status."""
    checks = {"contents": contents, "same": same, "statements": statements}
    found = checks[command](*map(Path, paths))
    print("\n".join(found) or f"{command}: {', '.join(Path(path).name for path in paths)}: well")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
