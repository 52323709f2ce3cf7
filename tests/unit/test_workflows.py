"""The workflow files say what is there: a renamed stage or option would only fail when a workflow runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not WORKFLOWS.exists(), reason="only a checkout has workflows")


def test_workflows_name_stages_options_extras_and_folders_that_there_are() -> None:
    stages = {stage.name[3:] for stage in (ROOT / ".ci" / "stages").iterdir()}
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    options = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "tests" / "support" / "options.py").read_text("utf-8")))
    missing = []
    for path in sorted(WORKFLOWS.glob("*.yml")):
        text = path.read_text("utf-8")
        named = {
            stage for words in re.findall(r"\.ci/run(?: --all)?((?: [a-z]+)*)$", text, re.M) for stage in words.split()
        }
        named |= {stage for words in re.findall(r"stage: \[(.*)\]", text) for stage in words.split(", ")}
        missing += [f"{path.name}: no stage {stage}" for stage in named - stages]
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
        missing += [f"{path.name}: no group {group}" for group in set(re.findall(r"--group (\w+)", text)) - set(groups)]
        missing += [f"{path.name}: no extra {extra}" for extra in set(re.findall(r"'\.\[(\w+)\]'", text)) - extras]
        for command in re.findall(r"-m pytest (.*)$|options: \[(.*)\]", text, re.M):
            used = set(re.findall(r"--[a-z-]+", " ".join(command)))
            missing += [f"{path.name}: no option {option}" for option in used - options]
        folders = re.findall(r"\btests/\w+", text)
        missing += [f"{path.name}: no folder {folder}" for folder in folders if not (ROOT / folder).is_dir()]
    assert not missing, "\n".join(missing)


def test_continuous_integration_runs_every_stage_that_the_gate_has() -> None:
    """`tests` runs as a matrix of systems; the others are jobs of their own."""
    text = (WORKFLOWS / "test.yml").read_text("utf-8")
    run = set(re.findall(r"\.ci/run (\w+)$", text, re.M)) | {"tests"}
    run |= {stage for words in re.findall(r"stage: \[(.*)\]", text) for stage in words.split(", ")}
    assert run == {stage.name[3:] for stage in (ROOT / ".ci" / "stages").iterdir()}
