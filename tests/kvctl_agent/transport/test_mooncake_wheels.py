"""Errors of Mooncake's three wheels, which share one folder; each has the command that repairs it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from kvctl_agent.contract import extras
from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.transport import open_transport
from kvctl_agent.transport.mooncake import engine as mooncake_engine

CPU = "mooncake-transfer-engine-non-cuda"
CUDA12 = "mooncake-transfer-engine"
CUDA13 = "mooncake-transfer-engine-cuda13"


def have(monkeypatch: pytest.MonkeyPatch, **wheels: str) -> None:
    """Makes exactly these wheels appear to be installed; names have _ for -."""

    def version(name: str) -> str:
        try:
            return wheels[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


def refusal(monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of `open_transport`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(TransportUnavailable) as refused:
        open_transport("mooncake", "a")
    return str(refused.value)


def test_none_of_them_names_the_extra_for_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have(monkeypatch)
    monkeypatch.setattr(extras, "_NVIDIA_DRIVER", tmp_path / "none")
    assert "pip install '.[mooncake-cpu]'" in refusal(monkeypatch)
    monkeypatch.setattr(extras, "_NVIDIA_DRIVER", tmp_path)
    assert "pip install '.[mooncake]'" in refusal(monkeypatch)


def test_an_old_one_is_refused_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, mooncake_transfer_engine_non_cuda="0.3.12.post2")
    said = refusal(monkeypatch)
    assert f"needs version 0.3.13 or newer, but {CPU} 0.3.12.post2 is installed" in said
    assert f"pip install --upgrade '{CPU}>=0.3.13'" in said


@pytest.mark.parametrize("version", ["0.3.13", "0.3.13.post1", "0.4.0rc1", "1.0"])
def test_newer_ones_pass(version: str) -> None:
    mooncake_engine._check_versions({CPU: version})


def test_files_that_went_with_another_wheel_are_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, mooncake_transfer_engine_non_cuda="0.3.13.post1")
    monkeypatch.setattr(mooncake_engine, "_NVIDIA_DRIVER", mooncake_engine._NVIDIA_DRIVER / "none")
    said = refusal(monkeypatch)
    assert "its files are gone" in said
    assert f"pip install --force-reinstall --no-deps '{CPU}>=0.3.13'" in said


@pytest.mark.parametrize("library", ["libcudart.so.12", "libcuda.so.1"])
@pytest.mark.parametrize(
    ("wheels", "uninstall"),
    [
        ({CUDA12: "0.3.13"}, f"pip uninstall -y {CUDA12} {CPU}"),
        ({CPU: "0.3.13", CUDA12: "0.3.13"}, f"pip uninstall -y {CUDA12} {CPU}"),
        ({CUDA12: "0.3.13", CUDA13: "0.3.13"}, f"pip uninstall -y {CUDA12} {CUDA13} {CPU}"),
    ],
)
def test_a_cuda_wheel_without_cuda_is_to_be_replaced(library: str, wheels: dict[str, str], uninstall: str) -> None:
    loader = ImportError(f"{library}: cannot open shared object file: No such file or directory")
    said = str(mooncake_engine.explain(loader, wheels))
    assert f"needs {library}" in said
    assert f"{uninstall} && pip install '{CPU}>=0.3.13'" in said


@pytest.mark.parametrize("library", ["libibverbs.so.1", "libnuma.so.1", "libcurl.so.4"])
def test_a_missing_library_names_all_packages_it_needs(library: str) -> None:
    loader = ImportError(f"{library}: cannot open shared object file: No such file or directory")
    said = str(mooncake_engine.explain(loader, {CPU: "0.3.13"}))
    packages = said.partition("apt-get install ")[2].partition(",")[0].split()
    assert sorted(packages) == ["libcurl4", "libibverbs1", "libnuma1"]


@pytest.mark.usefixtures("mooncake_started")
def test_a_binding_we_do_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_engine, "_NEEDED", ("initialize", "fly"))
    with pytest.raises(TransportUnavailable, match="lacks fly"):
        mooncake_engine.import_engine()


def test_a_variable_that_lets_tags_overtake_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match="MC_TCP_PROTO=1 the target does not acknowledge bytes"):
        open_transport("mooncake", "a")
