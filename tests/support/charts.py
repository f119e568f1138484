"""The chart, rendered by helm; and where the programs for Kubernetes are that `make test` installs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "kvctl"
TOOLS_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def which(tool: str) -> str | None:
    """Returns the path of a program in .venv or in PATH."""
    return shutil.which(tool, path=TOOLS_PATH)


def helm(
    *arguments: str, values: dict[str, Any] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs helm, with these values of the chart and in this folder."""
    program = which("helm")
    assert program is not None
    options = [] if values is None else ["--values", "-"]
    command = [program, *arguments, *options]
    return subprocess.run(
        command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=120, cwd=folder
    )


def render(values: dict[str, Any], namespace: str = "kvctl", name: str = "kvctl") -> list[dict[str, Any]]:
    """Returns the manifests of the chart."""
    outcome = helm("template", name, str(CHART), "--namespace", namespace, values=values)
    assert outcome.returncode == 0, outcome.stderr
    return [each for each in yaml.safe_load_all(outcome.stdout) if each is not None]
