"""examples/gpu_pools.py: as far as the CPU goes everywhere, and with its events where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu_pools.py"

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)


@pytest.mark.parametrize("more", [[], ["--pipelined"]], ids=["whole", "pipelined"])
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(["--prefill", "cpu", "--decode", "cpu", "--transport", "loopback"], id="cpu"),
        pytest.param(["--path", "staged"], id="staged", marks=with_gpu),
        pytest.param(["--path", "direct"], id="direct", marks=with_gpu),
    ],
)
def test_every_byte_is_as_computed(places: list[str], more: list[str]) -> None:
    ran = run(*places, *more, "--rooms", "2")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("2 rooms, each byte as computed; median ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_goes_without_one() -> None:
    ran = run()
    assert ran.returncode == 1
    assert ran.stderr == "there are 0 GPUs here; --prefill cpu --decode cpu needs none\n"
