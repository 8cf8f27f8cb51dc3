"""Workflow files, forms and the citation parse, and versions that two files name are one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sparseattn

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def steps(workflow: str) -> list[dict[str, Any]]:
    """Return the steps of all jobs."""
    return [step for job in loaded(f".github/workflows/{workflow}.yml")["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_run_scripts_and_targets_that_exist(name: str) -> None:
    targets = re.findall(r"^([a-z./-]+):", (ROOT / "Makefile").read_text(), re.M)
    for step in steps(name):
        assert ("uses" in step) != ("run" in step), f"a step either uses an action or runs a command: {step}"
        if words := step.get("run", "").split():
            known = words[1] in targets if words[0] == "make" else words[0] in (".ci/run", ".venv/bin/python")
            assert known, f"nothing here is called {step['run']}"


@pytest.mark.parametrize("name", ["ci", "release"])
def test_jobs_can_write_nothing_and_end(name: str) -> None:
    workflow = loaded(f".github/workflows/{name}.yml")
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert set(job.get("permissions", {})) <= {"id-token"}
        assert job["timeout-minutes"] <= 150


def test_the_matrix_has_every_python_of_the_classifiers() -> None:
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    matrix = loaded(".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == listed
    assert f'requires-python = ">={listed[0]}"' in PYPROJECT


def test_the_matrix_has_the_oldest_torch_and_transformers_that_are_allowed() -> None:
    (oldest,) = loaded(".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"]
    for package in ("torch", "transformers"):
        (bound,) = re.findall(rf'"{package}>=([\d.]+)', PYPROJECT)
        assert re.fullmatch(rf"{package}=={re.escape(bound)}(\.0)?", oldest[package])


def test_a_release_is_checked_against_its_tag_before_it_is_uploaded() -> None:
    workflow = loaded(".github/workflows/release.yml")
    checked = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    assert checked == ['make release-check TAG="$GITHUB_REF_NAME"']
    assert workflow["jobs"]["publish"]["needs"] == "build"


def test_pre_commit_runs_the_ruff_that_pyproject_pins() -> None:
    repository, schemas = loaded(".pre-commit-config.yaml")["repos"]
    (pinned,) = re.findall(r'"ruff==([\d.]+)"', PYPROJECT)
    assert repository["rev"] == f"v{pinned}"
    assert {hook["id"] for hook in repository["hooks"]} == {"ruff-check", "ruff-format"}
    assert {hook["id"] for hook in schemas["hooks"]} == {"check-github-workflows", "check-dependabot"}


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = loaded("CITATION.cff")
    assert citation["version"] == sparseattn.__version__
    assert f'license = "{citation["license"]}"' in PYPROJECT


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_ask_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(form)
    names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert names
    assert len(names) == len(set(names))
    assert all("label" in field["attributes"] for field in form["body"] if field["type"] != "markdown")


def test_the_offline_examples_of_the_readme_are_found() -> None:
    from scripts.release_check import offline_examples, requirements

    code = offline_examples((ROOT / "README.md").read_text())
    assert "load_model" not in code
    assert "import sparseattn" in code or "from sparseattn import" in code
    assert [requirement.partition(">=")[0] for requirement in requirements("release")] == ["build", "twine"]
