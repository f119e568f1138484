"""GPUs of a host, as nvidia-smi lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.lab.bench.machine import nvidia_gpus


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "0, NVIDIA H100, 570.1"\necho "1, NVIDIA H200, 570.1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_all_gpus_are_listed() -> None:
    assert {number: gpu["name"] for number, gpu in nvidia_gpus().items()} == {0: "NVIDIA H100", 1: "NVIDIA H200"}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["NVIDIA H200"]), ("1,0", ["NVIDIA H200", "NVIDIA H100"]), ("", [])]
)
def test_only_visible_gpus_are_numbered(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["name"] for gpu in nvidia_gpus().values()] == names


def test_a_host_without_nvidia_smi_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_gpus() == {}
