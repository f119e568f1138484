"""Precedence of the sources of global options, and errors that name the source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from kvctl.commands.context_file import Contexts
from kvctl.commands.options import spell_out_watch
from kvctl.commands.settings import resolve


@pytest.fixture
def user_file(surroundings: None) -> Path:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "kvctl" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def test_defaults(surroundings: None) -> None:
    settings = resolve({})
    assert (settings.output, settings.timeout_ns, settings.watch_ns) == ("table", 2_000_000_000, None)
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
    user_file.write_text('output = "xml"\n')
    with pytest.raises(click.UsageError, match=r"output in .*config\.toml: 'xml' is not one of"):
        resolve({})
    monkeypatch.setenv("KVCTL_OUTPUT", "xml")
    with pytest.raises(click.UsageError, match=r"KVCTL_OUTPUT \(environment\): 'xml'"):
        resolve({})
    with pytest.raises(click.UsageError, match="--timeout: 'x' is not a duration"):
        resolve({"output": "json", "timeout": "x"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("outptu = 'json'", "unknown key 'outptu'"),
        ("= =", "cannot be read"),
        pytest.param("a = " + "[" * 20_000, "values are nested more than 32 deep", id="brackets"),
        pytest.param("endpoint" + ".a" * 20_000 + " = 1", "values are nested more than 32 deep", id="dots"),
        pytest.param("timeout = " + "9" * 5000, "cannot be read", id="digits"),
        pytest.param("#" * (1 << 20) + "##", "it has more than 1 MiB", id="size"),
        ("output = '\udcff'", "it is not UTF-8 text: invalid start byte at byte 10"),
        pytest.param(f"output = '{'x' * 99_999}'", "is not one of", id="long"),
        ("endpoint = 5", "not a list of agent"),
    ],
)
def test_a_broken_file_is_named(user_file: Path, text: str, words: str) -> None:
    user_file.write_text(text, errors="surrogateescape")
    with pytest.raises(click.UsageError, match=words) as refused:
        resolve({})
    assert str(user_file) in str(refused.value)
    assert len(str(refused.value)) < 1000


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


FILE = 'endpoint = ["of-the-file"]\ntimeout = "9s"\n'
CONTEXTS: dict[str, Any] = {
    "lab": {"endpoint": ["tcp://lab:7000"], "timeout": "3s", "labels": ["role=decode"]},
    "prod": {"endpoint": ["tcp://prod:7000", "tcp://prod:7001"], "labels": ["role=prefill", "tp=0"]},
}


@pytest.fixture
def saved(user_file: Path) -> Contexts:
    """Saved contexts beside a user file."""
    user_file.write_text(FILE)
    made = Contexts(user_file.with_name("contexts.json"), named=CONTEXTS)
    made.save()
    return made


def test_a_context_counts_by_what_chose_it(saved: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve({}).endpoints == ("of-the-file",)
    saved.in_use = "lab"
    saved.save()
    assert resolve({}).endpoints == ("tcp://lab:7000",)
    assert resolve({}).timeout_ns == 3_000_000_000
    assert resolve({"context": "prod"}).timeout_ns == 9_000_000_000  # not set in the context
    monkeypatch.setenv("KVCTL_CONTEXT", "prod")
    assert resolve({}).endpoints == ("tcp://prod:7000", "tcp://prod:7001")
    monkeypatch.setenv("KVCTL_ENDPOINT", "of-the-environment")
    assert resolve({}).endpoints == ("of-the-environment",)
    assert resolve({"context": "lab"}).endpoints == ("tcp://lab:7000",)
    assert resolve({"context": "lab", "endpoint": ("tcp://flag:1",)}).endpoints == ("tcp://flag:1",)


def test_names_in_flags_select_among_the_agents_of_the_fleet(saved: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:

    def chosen(*endpoints: str, **flags: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        settings = resolve({"endpoint": endpoints, **flags})
        return settings.endpoints, settings.names

    assert chosen("decode-0", "p*") == (("decode-0", "p*"), ())
    assert chosen("decode-0", "p*", context="lab") == (("tcp://lab:7000",), ("decode-0", "p*"))
    assert chosen("decode-0", "tcp://flag:1", context="lab") == (("decode-0", "tcp://flag:1"), ())
    monkeypatch.setenv("KVCTL_ENDPOINT", "of-the-environment")
    assert chosen("decode-0") == (("decode-0",), ())
    monkeypatch.setenv("KVCTL_ENDPOINT", "file:///fleet")
    assert chosen("decode-0") == (("file:///fleet",), ("decode-0",))


def test_named_agents_are_added_to_those_of_flags(saved: Contexts) -> None:
    local = resolve({"endpoint": ("decode-0",)}).naming(["decode-1"])
    assert (local.endpoints, local.names) == (("decode-0", "decode-1"), ())
    fleet = resolve({"context": "lab"}).naming(["decode-1"])
    assert (fleet.endpoints, fleet.names) == (("tcp://lab:7000",), ("decode-1",))


def test_labels_of_a_context_are_narrowed_by_flags(saved: Contexts) -> None:
    assert resolve({"context": "lab"}).labels == {"role": "decode"}
    flags = {"context": "prod", "labels": ("dp=1,tp=3",)}
    assert resolve(flags).labels == {"role": "prefill", "tp": "3", "dp": "1"}
    with pytest.raises(click.UsageError, match="--label: no agent has both tp=3 and tp=4"):
        resolve({"labels": ("dp=1,tp=3", "tp=4")})


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (CONTEXTS, "--context: no context 'prdo' in .*, did you mean prod"),
        ({}, "there are none: kvctl context add"),
        ({"prdo": {"endpoint": 3}}, "endpoint of context prdo in .*: 3 is not a list"),
        ({"prdo": {"labels": "colour=red"}}, "labels of context prdo in .* colour=red: write KEY=VALUE"),
        ({"prdo": {"labels": 5}}, "5 is not a list of KEY=VALUE"),
    ],
)
def test_a_wrong_context_is_named_with_its_file(named: dict[str, Any], words: str, saved: Contexts) -> None:
    saved.named = named
    saved.save()
    with pytest.raises(click.UsageError, match=words):
        resolve({"context": "prdo"})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "[]", "{}", '{"in_use": 1, "contexts": {}}', '{"in_use": null, "contexts": []}'),
        *('{"in_use": null, "contexts": {"x": 1}}', '{"in_use": null, "contexts": {"x": {"endpiont": "a"}}}'),
    ],
)
def test_a_broken_file_of_contexts_is_named(text: str, saved: Contexts) -> None:
    saved.path.write_text(text)
    with pytest.raises(click.UsageError) as refused:
        resolve({})
    assert str(saved.path) in str(refused.value)
