"""The variables that must be set before torch and the engines are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl_agent.errors import ConfigError
from kvctl_agent.transport import environment, prepare_environment

NAMES = (
    "THP_MEM_ALLOC_ENABLE",
    "NIXL_LOG_LEVEL",
    "UCX_LOG_FILE",
    "UCX_MODULES",
    "MC_LOG_LEVEL",
    "MC_TCP_STATUS_TIMEOUT_SEC",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without RDMA devices, and an environment without the variables."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_INFINIBAND", tmp_path / "infiniband")


def test_sets_what_is_missing_once() -> None:
    assert prepare_environment() == {
        "THP_MEM_ALLOC_ENABLE": "1",
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_LOG_FILE": "stderr",
        "UCX_MODULES": "^ib",
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_STATUS_TIMEOUT_SEC": "86400",
    }
    assert prepare_environment() == {}


@pytest.mark.parametrize("name", NAMES)
def test_never_overrides_the_user(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    assert name not in prepare_environment()


def test_keeps_the_ib_module_where_there_is_an_rdma_device(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert "UCX_MODULES" not in prepare_environment()


def test_an_empty_device_directory_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "infiniband").mkdir()
    assert prepare_environment()["UCX_MODULES"] == "^ib"


@pytest.mark.parametrize("lanes", ["all", "^ib", "tcp,cuda", "sm,cuda_copy,cuda_ipc", None])
def test_lanes_that_reach_a_gpu_are_fine(lanes: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    environment.require_cuda_transports()


@pytest.mark.parametrize("lanes", ["tcp,self", "cuda_ipc", "rc,sm"])
def test_lanes_that_reach_none_are_refused(lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    with pytest.raises(ConfigError, match=f"UCX_TLS={lanes} excludes GPU memory: .* add cuda"):
        environment.require_cuda_transports()
