"""`kvctl context`: named fleets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvctl.commands.context_file import Contexts


@pytest.fixture
def path(surroundings: None) -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"]) / "kvctl" / "contexts.json"


def rows(kvctl: Any, *args: str) -> dict[str, Any]:
    outcome = kvctl("context", *args, "-o", "json")
    assert outcome.code == 0, outcome.err
    return {row["context"]: row for row in outcome.data}


def test_a_context_is_added_used_shown_and_removed(kvctl: Any, path: Path, fleet: Any) -> None:
    assert kvctl("context", "add", "decoders", "-l", "role=decode", "--timeout", "5s").code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "no context is in use" in kvctl("context", "show").err
    names = kvctl("-c", "decoders", "agents", "--columns", "agent").out
    assert names.split() == ["AGENT", "decode-0", "decode-1"]
    assert kvctl("context", "use", "decoders").code == 0
    assert kvctl("agents", "--columns", "agent").out == names
    assert rows(kvctl, "show")["decoders"] | {"endpoint": None} == {
        "context": "decoders",
        "in_use": True,
        "endpoint": None,
        "labels": ["role=decode"],
        "timeout": "5s",
        "key": None,
        "server_key": None,
    }
    assert kvctl("context", "use", "--none").code == 0
    assert not rows(kvctl)["decoders"]["in_use"]
    assert kvctl("context", "use", "decoders").code == 0
    assert "none is in use" in kvctl("context", "rm", "decoders").err
    assert rows(kvctl) == {}
    assert kvctl("agents", "--columns", "agent").out.count("\n") == 5


def test_one_that_exists_is_replaced_only_on_purpose(kvctl: Any, path: Path) -> None:
    assert kvctl("context", "add", "a", "-e", "decode-0").code == 0
    outcome = kvctl("context", "add", "a", "-e", "decode-1")
    assert (outcome.code, "add --replace" in outcome.err) == (2, True)
    assert kvctl("context", "add", "a", "-e", "decode-1", "-e", "decode-2", "--replace", "--use").code == 0
    assert rows(kvctl)["a"]["endpoint"] == ["decode-1", "decode-2"]
    assert rows(kvctl)["a"]["in_use"]


def test_key_files_are_kept_with_their_whole_path(
    kvctl: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kvctl("key", "new", "me").code == 0
    (tmp_path / "fleet.pub").write_text("0" * 64)
    monkeypatch.chdir(tmp_path)
    assert kvctl("context", "add", "a", "--server-key", "fleet.pub", "--key", "me").code == 0
    row = rows(kvctl)["a"]
    assert (row["server_key"], row["key"]) == (str(tmp_path / "fleet.pub"), "me")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--key", "nope"), "nope.key"),
        (("--server-key", "fleet.pub"), "keys: copy the fleet's .pub file there"),
        (("--server-key", "lib/fleet.pub"), "nor an existing .pub file"),
    ],
)
def test_a_context_with_a_key_that_cannot_be_used_is_not_saved(
    kvctl: Any, path: Path, option: tuple[str, str], words: str
) -> None:
    outcome = kvctl("context", "add", "a", "-e", "tcp://node-0:7000", *option, "--use")
    assert (outcome.code, words in outcome.err) == (2, True), outcome.err
    assert "a" not in rows(kvctl)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("add", "a"), "context a needs a value"),
        (("add", "a b", "-e", "x"), "is not a context name"),
        (("add", "a", "--timeout", "soon"), "--timeout: 'soon' is not a duration"),
        (("add", "a", "-l", "colour=red"), "write KEY=VALUE with a key of role"),
        (("use",), "give the NAME of a context, or --none"),
        (("use", "lba"), "did you mean lab?"),
        (("rm", "x"), "there are: lab, prod.eu"),
        (("show", "x"), "there are: lab, prod.eu"),
        (("lst",), "did you mean 'kvctl context ls'"),
    ],
)
def test_wrong_usage_changes_nothing(args: tuple[str, ...], words: str, kvctl: Any, path: Path) -> None:
    Contexts(path, named={"lab": {"endpoint": ["x"]}, "prod.eu": {"endpoint": ["y"]}}).save()
    before = path.read_bytes()
    outcome = kvctl("context", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_said_and_nothing_is_left(kvctl: Any, path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("")
    outcome = kvctl("context", "add", "a", "-e", "x")
    assert (outcome.code, "cannot" in outcome.err) == (1, True)


def test_sources_are_saved_as_urls_and_asked_whenever_the_context_is_used(
    kvctl: Any, path: Path, fleet: Any, socket_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my list").write_text(f"{socket_directory}/decode-0.sock\n")
    file = f"file://{tmp_path}/my%20list"
    assert kvctl("context", "add", "a", "-e", f"prefill-0,prefill-1 {file}").code == 0
    assert rows(kvctl)["a"]["endpoint"] == ["prefill-0", "prefill-1", file]

    def names() -> list[str]:
        return kvctl("-c", "a", "agents", "--columns", "agent", "--filter", "state=ok").out.split()[1:]

    assert names() == ["decode-0", "prefill-0", "prefill-1"]
    (tmp_path / "my list").write_text(f"ipc://{socket_directory}/decode-1.sock\n")
    assert names() == ["decode-1", "prefill-0", "prefill-1"]
    (tmp_path / "my list").unlink()
    outcome = kvctl("-c", "a", "agents")
    assert (outcome.code, "there is no such file" in outcome.err) == (7, True)


def test_a_wrong_source_is_not_saved(kvctl: Any, path: Path) -> None:
    outcome = kvctl("context", "add", "a", "-e", "file://list")
    assert (outcome.code, "write file:///PATH" in outcome.err) == (2, True)
    assert not path.exists()
