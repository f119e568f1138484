"""Transports by name, and the errors if an engine is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvctl_agent
from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.transport import open_transport
from kvctl_agent.transport.engine_errors import unavailable


def test_an_unknown_transport_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError, match="unknown 'nixel'; allowed: nixl, mooncake, loopback, did you mean nixl"):
        open_transport("nixel", "a")


def test_an_endless_agent_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="257 characters; allowed: up to 256"):
        open_transport("loopback", "n" * 257)


def test_an_engine_that_is_not_installed_names_the_extra_and_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("nixl", "nixl_cu13", "nixl_cu12")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportUnavailable, match=r"pip install '\.\[nixl\]'.*--transport loopback"):
        open_transport("nixl", "a")


def test_a_missing_library_is_named_with_its_debian_package() -> None:
    loader = ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
    assert "libibverbs.so.1" in str(unavailable("mooncake", loader))
    assert "apt-get install libibverbs1" in str(unavailable("mooncake", loader))
    assert "--transport loopback" in str(unavailable("mooncake", loader))


def test_a_missing_library_that_no_package_is_known_for_is_still_named() -> None:
    error = unavailable("nixl", ImportError("libcuda.so.1: cannot open shared object file"))
    assert "libcuda.so.1" in str(error)
    assert "apt-get" not in str(error)


def test_importing_the_package_loads_no_engine() -> None:
    heavy = ("nixl", "mooncake", "torch")
    code = f"import sys, kvctl_agent.transport; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(kvctl_agent.__file__).parents[1])},
    )
    assert done.stdout.strip() == "[]"
