"""What the unit tests take for vLLM is what the installed vLLM has, and the connector's hooks are vLLM's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_they_have_what_vllm_has() -> None:
    python = Path(os.environ["VLLM_VENV"]) / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "tests.support.vllm.compare"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
