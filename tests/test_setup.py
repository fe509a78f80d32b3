"""The ways to install the project agree with one another, and set-up needs nothing that is not pinned."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def environment() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, Version]:
    return {
        canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in constraint_lines())
    }


def test_constraints_are_exact_pins_and_nothing_else() -> None:
    for line in constraint_lines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line
    assert len(pins()) == len(constraint_lines()), "a package is pinned twice"


def test_every_dependency_is_pinned_within_its_range(project: dict[str, Any]) -> None:
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    for requirement in map(Requirement, wanted):
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt"
        assert pin in requirement.specifier, f"{requirement} and {pin} in constraints.txt disagree"
    assert pins()["torch"] == Version("2.13.0")


def test_conda_gets_the_packages_of_pyproject(project: dict[str, Any], environment: dict[str, Any]) -> None:
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[dev]"]}, "conda must add no package of its own"
    python, installer = map(str, conda)
    assert installer == "pip"
    assert Version(python.removeprefix("python=")) in Requirement(f"python{project['requires-python']}").specifier
    assert environment["name"] == project["name"] == "pcdlab"
    assert "dev" in project["optional-dependencies"]


def test_the_set_up_names_no_package_index() -> None:
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|--hash|--index-url|--extra-index-url", text), name


def test_ci_script_is_executable_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this project's Makefile in another folder, as if no `make` were running these tests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    return subprocess.run(
        ["make", "-f", ROOT / "Makefile", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder whose set-up installs nothing: a stand-in for Python plays venv, pip and the programs."""
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'echo "$0 $*" >> log\n'
        'case "$*" in\n'
        "  -c*) exit ${TOO_OLD:-0} ;;\n"
        "  --version) echo Python 3.8.0 ;;\n"
        "  '-m venv .venv') mkdir -p .venv/bin; cp python .venv/bin/python; cp python .venv/bin/pcdlab ;;\n"
        "  *'pip install'*) exit ${PIP_FAILS:-0} ;;\n"
        "esac\n"
    )
    python.chmod(0o755)
    return tmp_path


def steps(folder: Path) -> str:
    log = folder / "log"
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return text


def test_make_sets_up_once_then_works(copy: Path) -> None:
    assert make(copy, "test", "PYTHON=./python").returncode == 0
    first = steps(copy)
    assert "-m venv .venv" in first
    assert ".venv/bin/python -m pip install -c constraints.txt -e .[dev]" in first
    assert ".venv/bin/pcdlab models fetch smollm2-135m" in first
    assert first.splitlines()[-1] == ".venv/bin/python -m pytest"
    assert make(copy, "reports", "PYTHON=./python", "ARGS=--fresh").returncode == 0
    second = steps(copy)
    assert "pip" not in second
    assert second.splitlines()[-1] == ".venv/bin/pcdlab report --fresh"
    os.utime(copy / "constraints.txt", (2**31, 2**31))
    make(copy, "bench", "PYTHON=./python")
    assert "pip install" in steps(copy)


def test_the_extra_backends_are_installed_only_when_asked_for(copy: Path) -> None:
    assert make(copy, "test", "PYTHON=./python").returncode == 0
    assert "llamacpp" not in steps(copy)
    assert make(copy, "test-extras", "PYTHON=./python").returncode == 0
    install, tests = steps(copy).splitlines()[-2:]
    assert install == ".venv/bin/python -m pip install -c constraints.txt -e .[dev,llamacpp,mlx]"
    assert tests.startswith(".venv/bin/python -m pytest tests/test_llamacpp_")


def test_an_interrupted_set_up_starts_over(copy: Path) -> None:
    assert make(copy, "test", "PYTHON=./python", "PIP_FAILS=1").returncode == 2
    assert "pytest" not in steps(copy)
    (copy / ".venv" / "half").write_text("")
    assert make(copy, "test", "PYTHON=./python").returncode == 0
    assert not (copy / ".venv" / "half").exists()
    assert "pytest" in steps(copy)


def test_an_environment_made_by_hand_is_kept(copy: Path) -> None:
    (copy / ".venv").mkdir()
    (copy / ".venv" / "mine").write_text("")
    assert make(copy, "test", "PYTHON=./python").returncode == 0
    assert (copy / ".venv" / "mine").exists()


def test_an_old_python_is_refused_by_name(copy: Path) -> None:
    done = make(copy, "test", "PYTHON=./python", "TOO_OLD=1")
    assert done.returncode == 2
    assert "pcdlab needs Python 3.11 or newer, and './python' is: Python 3.8.0." in done.stderr
    assert "make PYTHON=/path/to/python3.11 test" in done.stderr
    assert not (copy / ".venv").exists()
    done = make(copy, "test", "PYTHON=no-such-python")
    assert "pcdlab needs Python 3.11" in done.stderr


def test_clean_removes_what_set_up_made(copy: Path) -> None:
    make(copy, "test", "PYTHON=./python")
    (copy / "deep" / "__pycache__").mkdir(parents=True)
    assert make(copy, "clean").returncode == 0
    assert not (copy / ".venv").exists()
    assert not (copy / "deep" / "__pycache__").exists()


def test_help_names_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    shown = make(ROOT).stdout
    for target in set(targets[1].split()) - {"help", "setup"}:
        assert f"make {target} " in shown
