"""Global options: flags over environment over file, and an error that names its source."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from kvctl.commands.options import spell_out_watch
from kvctl.commands.settings import resolve


@pytest.fixture
def user_file(surroundings: None) -> Path:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "kvctl" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def test_defaults(surroundings: None) -> None:
    settings = resolve({})
    assert (settings.output, settings.timeout_ns, settings.watch_ns) == (None, 2_000_000_000, None)
    assert (settings.endpoints, settings.labels, settings.color) == ((), {}, "auto")


def test_flags_beat_environment_beats_file(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file.write_text('output = "csv"\ntimeout = "7s"\nendpoint = ["a", "b"]\n')
    assert resolve({}).output == "csv"
    assert resolve({}).endpoints == ("a", "b")
    monkeypatch.setenv("KVCTL_OUTPUT", "json")
    monkeypatch.setenv("KVCTL_TIMEOUT", "3")
    monkeypatch.setenv("KVCTL_ENDPOINT", "c, d")
    assert (resolve({}).output, resolve({}).timeout_ns) == ("json", 3_000_000_000)
    assert resolve({}).endpoints == ("c", "d")
    flags = {"output": "wide", "timeout": "250ms", "endpoint": ("e",)}
    assert (resolve(flags).output, resolve(flags).timeout_ns) == ("wide", 250_000_000)
    assert resolve(flags).endpoints == ("e",)


def test_a_wrong_value_names_its_source(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file.write_text('output = "yaml"\n')
    with pytest.raises(click.UsageError, match=r"output in .*config\.toml: 'yaml' is not one of"):
        resolve({})
    monkeypatch.setenv("KVCTL_OUTPUT", "xml")
    with pytest.raises(click.UsageError, match=r"KVCTL_OUTPUT \(environment\): 'xml'"):
        resolve({})
    with pytest.raises(click.UsageError, match="--timeout: 'x' is not a duration"):
        resolve({"output": "json", "timeout": "x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [("outptu = 'json'", "unknown key 'outptu'"), ("= =", "cannot be read"), ("endpoint = 5", "not a list of agent")],
)
def test_a_broken_file_is_named(user_file: Path, text: str, words: str) -> None:
    user_file.write_text(text)
    with pytest.raises(click.UsageError, match=words) as refused:
        resolve({})
    assert str(user_file) in str(refused.value)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        (["-w", "status"], ["--watch=2", "status"]),
        (["status", "-w"], ["status", "--watch=2"]),
        (["status", "-w", "0.5"], ["status", "--watch=0.5"]),
        (["status", "--watch", "500ms", "-q"], ["status", "--watch=500ms", "-q"]),
        (["--watch=3", "status"], ["--watch=3", "status"]),
        (["bench", "--", "-w"], ["bench", "--", "-w"]),
    ],
)
def test_watch_takes_a_time_or_nothing(given: list[str], spelled: list[str]) -> None:
    assert spell_out_watch(given) == spelled
