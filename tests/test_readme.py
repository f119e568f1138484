"""What README shows must run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\.venv/bin/kvctl (\w+)", README, re.MULTILINE))))
def test_every_command_it_shows_exists(command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvctl", command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_its_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
