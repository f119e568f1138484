"""`kvctl context`: named fleets in the user file, whose other contents are preserved."""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.commands import context_file

OWN = """# mine, and I like it so
output = "wide"   # because

# the lab
[contexts.lab]
endpoint = [
  "tcp://lab:7000",  # the one on the left
]

# for production, mind the key
[contexts."prod.eu"]
endpoint = "tcp://prod:7000"
"""


@pytest.fixture
def path(surroundings: None) -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"]) / "kvctl" / "config.toml"


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


def test_a_context_can_be_made_that_the_project_already_names(
    kvctl: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".kvctl.toml").write_text('context = "prod"\n')
    monkeypatch.chdir(tmp_path)
    outcome = kvctl("status")
    assert (outcome.code, "no context 'prod'" in outcome.err, ".kvctl.toml" in outcome.err) == (2, True, True)
    assert kvctl("context", "add", "prod", "-e", "decode-0").code == 0
    assert rows(kvctl)["prod"]["in_use"]


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
    path.parent.mkdir(parents=True)
    path.write_text(OWN)
    outcome = kvctl("context", *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert path.read_text() == OWN


def test_what_the_user_wrote_stays_as_it_is(kvctl: Any, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(OWN)
    assert kvctl("context", "use", "prod.eu").code == 0
    assert path.read_text() == OWN.replace("# the lab", 'context = "prod.eu"\n# the lab')
    assert kvctl("context", "use", "lab").code == 0
    assert kvctl("context", "use", "--none").code == 0
    assert path.read_text() == OWN
    assert kvctl("context", "add", "lab", "-e", "a", "--replace").code == 0
    before, after = OWN.split("endpoint = [", 1)
    assert path.read_text() == before + 'endpoint = ["a"]\n' + after.split("]\n", 1)[1]
    assert kvctl("context", "rm", "lab").code == 0
    assert 'output = "wide"   # because' in path.read_text()
    assert "# for production, mind the key" in path.read_text()
    assert rows(kvctl).keys() == {"prod.eu"}


def test_a_link_to_a_file_elsewhere_stays_a_link(kvctl: Any, path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True)
    (tmp_path / "dotfile").write_text(OWN)
    path.symlink_to(tmp_path / "dotfile")
    assert kvctl("context", "use", "lab").code == 0
    assert path.is_symlink()
    assert 'context = "lab"' in (tmp_path / "dotfile").read_text()


@pytest.mark.parametrize(
    "text",
    ['contexts = { lab = { endpoint = "x" } }\n', 'contexts.lab.endpoint = "x"\n', '[contexts]\nlab.key = "x"\n'],
)
def test_what_cannot_be_edited_is_left_alone_and_said(text: str, kvctl: Any, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    outcome = kvctl("context", "rm", "lab")
    assert (outcome.code, "change [contexts.NAME] in it by hand" in outcome.err) == (1, True)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_said_and_nothing_is_left(kvctl: Any, path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("")
    outcome = kvctl("context", "add", "a", "-e", "x")
    assert (outcome.code, "cannot" in outcome.err) == (1, True)


WORDS = st.text("abz.-_ \"'\\#[]=\t\u00e9", max_size=8)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["lab", "prod.eu", "x"]), st.lists(WORDS, max_size=2)),
        st.tuples(st.just("remove"), st.sampled_from(["lab", "prod.eu", "x"]), st.none()),
        st.tuples(st.just("use"), st.sampled_from(["lab", "prod.eu", "x", None]), st.none()),
    ),
    max_size=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=CHANGES, start=st.sampled_from(["", OWN, OWN.rstrip("\n"), "[other]\nx = [\n[1],\n[2]]\n"]))
def test_whatever_is_changed_the_rest_is_untouched(changes: list[Any], start: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(start)
    expected = tomllib.loads(start)
    contexts = expected.pop("contexts", {})
    for what, name, words in changes:
        if what == "put":
            context_file.put(path, name, {"endpoint": words})
            contexts[name] = {"endpoint": words}
        elif what == "remove":
            context_file.remove(path, name)
            contexts.pop(name, None)
            if expected.get("context") == name:
                del expected["context"]
        else:
            context_file.use(path, name)
            expected.pop("context", None)
            expected |= {"context": name} if name else {}
    left = tomllib.loads(path.read_text())
    assert left.pop("contexts", {}) == contexts
    assert left == expected
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]


def test_sources_are_saved_as_urls_and_asked_whenever_the_context_is_used(
    kvctl: Any, path: Path, fleet: Any, socket_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my list").write_text(f"{socket_directory}/decode-0.sock\n")
    command = f"echo {socket_directory}/prefill-0.sock, | tr -d ,"
    assert kvctl("context", "add", "a", "--file", "my list", "--command", command, "-e", "prefill-1").code == 0
    assert rows(kvctl)["a"]["endpoint"] == ["prefill-1", f"file://{tmp_path}/my%20list", f"exec:{command}"]

    def names() -> list[str]:
        return kvctl("-c", "a", "agents", "--columns", "agent", "--filter", "state=ok").out.split()[1:]

    assert names() == ["decode-0", "prefill-0", "prefill-1"]
    (tmp_path / "my list").write_text(f"ipc://{socket_directory}/decode-1.sock\n")
    assert names() == ["decode-1", "prefill-0", "prefill-1"]
    (tmp_path / "my list").unlink()
    outcome = kvctl("-c", "a", "agents")
    assert (outcome.code, "there is no such file" in outcome.err) == (7, True)


def test_a_wrong_source_is_not_saved(kvctl: Any, path: Path) -> None:
    outcome = kvctl("context", "add", "a", "--command", "")
    assert (outcome.code, "write exec:COMMAND" in outcome.err) == (2, True)
    assert not path.exists()


def test_a_command_from_a_file_that_others_may_write_is_not_run(
    kvctl: Any, path: Path, fleet: Any, socket_directory: Path, tmp_path: Path
) -> None:
    command = f"exec:touch {tmp_path}/ran; echo {socket_directory}/decode-0.sock"
    path.parent.mkdir(parents=True)
    path.write_text(f'endpoint = "{command}"\n[contexts.mine]\nendpoint = "{command}"\n')
    for wrong, mode in ((path, 0o666), (path.parent, 0o757), (path, 0o662)):
        before = wrong.stat().st_mode
        wrong.chmod(mode)
        for flags in ((), ("-c", "mine")):
            outcome = kvctl(*flags, "agents")
            assert outcome.code == 2
            assert "the command is not run: " in outcome.err
            text = " ".join(outcome.err.split())
            assert f"mode {mode:04o}) lets other users write to it: chmod go-w" in text
        assert kvctl("-e", f"{socket_directory}/decode-1.sock", "agents").code == 0
        wrong.chmod(before)
    assert not (tmp_path / "ran").exists()
    assert kvctl("agents", "--columns", "agent").out.split() == ["AGENT", "decode-0"]
    assert (tmp_path / "ran").exists()


def test_commands_of_a_cloned_repository_do_not_run(
    kvctl: Any, path: Path, fleet: Any, socket_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project = tmp_path / ".kvctl.toml"
    command = f"exec:touch {tmp_path}/ran; echo {socket_directory}/decode-0.sock"
    for value in (f'"{command}"', f'["decode-1", "{command}"]', f'"decode-1 {command}"'):
        project.write_text(f"endpoint = {value}\n")
        outcome = kvctl("agents")
        assert (outcome.code, "commands of a project file are not run" in outcome.err) == (2, True)
    assert not (tmp_path / "ran").exists()
    # The user's own commands run, also if the project selects the context.
    path.parent.mkdir(parents=True)
    path.write_text(f'[contexts.mine]\nendpoint = "{command}"\n')
    project.write_text('context = "mine"\n')
    assert kvctl("agents", "--columns", "agent").out.split() == ["AGENT", "decode-0"]
    assert (tmp_path / "ran").exists()
    project.unlink()
    monkeypatch.setenv("KVCTL_ENDPOINT", command)
    assert kvctl("agents", "--columns", "agent").out.split() == ["AGENT", "decode-0"]
