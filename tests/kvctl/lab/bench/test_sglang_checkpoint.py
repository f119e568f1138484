"""Servers that are started one after another have the same weights."""

from __future__ import annotations

from pathlib import Path

from kvctl.lab.bench.sglang_checkpoint import write_checkpoint


def test_a_seed_gives_one_checkpoint(tmp_path: Path) -> None:
    for name in "ab":
        write_checkpoint(tmp_path / name)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    write_checkpoint(tmp_path / "c", seed=8)
    assert (tmp_path / "c" / "model.safetensors").read_bytes() != first
