"""The second attempt: for few failures, once, in a fresh process, and only with its own outcome."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).with_name("again.py")

# Each leaves a mark where it ran, so that its next attempt knows.
TESTS = """
import pathlib, pytest

def first(name):
    mark = pathlib.Path(name)
    before = mark.exists()
    mark.write_text("")
    return not before

def test_fine(): pass
def test_unsteady(): assert not first("unsteady")
def test_broken(): assert False

@pytest.mark.parametrize("which", ["[c]", "a b"])
def test_named(which): assert not first("named" + which)

@pytest.fixture
def torn():
    yield
    assert not first("torn")

def test_torn(torn): pass
"""


@pytest.fixture
def again(tmp_path: Path):
    """Runs it on some tests of a file, in a directory of its own."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(AGAIN), "-q", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)

    return run


def test_what_passes_is_run_once(again):
    done = again("-k", "fine")
    assert done.returncode == 0
    assert done.stdout.count(" passed") == 1
    assert "again" not in done.stdout


def test_what_then_passes_is_named_and_passes(again):
    """Whatever its name, and also where it was a fixture that failed."""
    done = again("-k", "unsteady or c or torn or fine")
    assert done.returncode == 0
    told = [line for line in done.stdout.splitlines() if line.startswith("tests: unsteady: ")]
    assert told == [
        f"tests: unsteady: test_some.py::{each}" for each in ("test_named[[c]]", "test_torn", "test_unsteady")
    ]
    assert "assert not first" in done.stdout, "the first attempt's traceback stays"
    assert done.stdout.splitlines()[-1].startswith("3 passed")


def test_what_fails_again_fails(again):
    done = again("-k", "broken or unsteady")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("1 failed, 1 passed")


def test_many_failures_are_final(again):
    done = again()
    assert done.returncode == 1
    assert "again" not in done.stdout


def test_a_run_that_did_not_come_to_its_end_is_final(again, tmp_path: Path):
    (tmp_path / "test_torn_file.py").write_text("1 / 0")
    done = again()
    assert done.returncode == 2
    assert "again" not in done.stdout
