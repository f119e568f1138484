"""The selection of NIXL's wheel, without importing torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import kvctl_agent
from kvctl_agent.errors import TransportUnavailable
from kvctl_agent.transport.nixl import binding as nixl_binding


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that appear to be installed; none is loaded."""
    present: set[str] = set()
    for name in [name for name in sys.modules if name.split(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13", "torch")]:
        monkeypatch.delitem(sys.modules, name)

    def import_module(name: str) -> ModuleType:
        package = name.partition(".")[0]
        if package not in present:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return ModuleType(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(nixl_binding, "_has", present.__contains__)
    return present


@pytest.mark.parametrize(
    ("driver", "torch", "chosen"),
    [(None, None, "nixl_cu13"), (13, None, "nixl_cu13"), (12, None, "nixl_cu12"), (13, "12.8", "nixl_cu12")],
)
def test_the_driver_decides_or_a_torch_that_is_there_already(
    wheels: set[str], monkeypatch: pytest.MonkeyPatch, driver: int | None, torch: str | None, chosen: str
) -> None:
    wheels |= {"nixl_cu12", "nixl_cu13"}
    monkeypatch.setattr(nixl_binding, "driver_cuda", lambda: driver)
    if torch:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=torch)))
    assert nixl_binding.import_binding()[0].__name__ == f"{chosen}._bindings"


def test_an_older_build_serves_a_newer_driver(wheels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.add("nixl_cu12")
    monkeypatch.setattr(nixl_binding, "driver_cuda", lambda: 13)
    assert nixl_binding.import_binding()[0].__name__ == "nixl_cu12._bindings"


def test_a_build_that_is_too_new_for_the_driver_is_named(wheels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.add("nixl_cu13")
    monkeypatch.setattr(nixl_binding, "driver_cuda", lambda: 12)
    with pytest.raises(TransportUnavailable, match=r"nixl-cu13 is installed, .* CUDA 12: pip install nixl-cu12"):
        nixl_binding.import_binding()


def test_a_binding_that_is_loaded_already_is_the_one(wheels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("nixl_cu12._bindings")
    monkeypatch.setitem(sys.modules, "nixl._bindings", loaded)  # as NIXL's own package does it
    assert nixl_binding.import_binding()[0] is loaded


def test_nothing_installed_names_the_extra(wheels: set[str]) -> None:
    with pytest.raises(TransportUnavailable, match=r"pip install '\.\[nixl\]'"):
        nixl_binding.import_binding()


def test_loading_nixl_imports_no_torch() -> None:
    code = (
        "import sys; from kvctl_agent.transport.nixl import binding; _, version = binding.load()\n"
        "print('torch' in sys.modules, version, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(kvctl_agent.__file__).parents[1])},
    )
    assert done.stdout == ""
    assert done.stderr.startswith("False 1."), done.stderr
