"""Agents that have vanished, sources that do not answer, and the file that remembers both."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.client.discovery.memory import KEPT_NS, MAX_FILES, MAX_GONE, Memory, forget, path_of
from kvctl.client.discovery.source import AgentSources
from kvctl.client.endpoints import Endpoint, Gone, endpoint_of
from kvctl.client.fleet import Fleet
from kvctl.client.keys import NO_KEYS

S = 1_000_000_000
URL = "file:///list"


def at(*places: str) -> list[Endpoint]:
    return [endpoint_of(f"tcp://{place}:1") for place in places]


def names(gone: tuple[Gone, ...]) -> list[str]:
    return [each.endpoint.name for each in gone]


@pytest.fixture(autouse=True)
def cache(surroundings: None) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "kvctl" / "agents"


def saved(url: str, now_ns: int, *places: str) -> Memory:
    memory = Memory(url)
    memory.update(at(*places), (), now_ns)
    memory.learn({})
    return memory


def test_who_is_named_no_more_has_vanished_for_a_day(cache: Path) -> None:
    now = time.time_ns()
    saved(URL, now, "a", "b")
    again = Memory(URL)
    (gone,) = again.update(at("a"), (), now + S)
    assert (gone.endpoint.address, gone.seen_ns) == ("tcp://b:1", now)
    assert names(again.update(at("a"), (), now + KEPT_NS)) == ["b:1"]
    assert names(again.update(at("a"), (), now + KEPT_NS + 1)) == []
    assert names(again.update(at("a", "b"), (), now + 2 * KEPT_NS)) == []
    assert stat.S_IMODE(path_of(URL).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_agents_are_remembered_by_the_names_that_they_say() -> None:
    now = time.time_ns()
    memory = Memory(URL)
    memory.update(at("a", "b"), (), now)
    memory.learn({"tcp://a:1": ("decode-0", "n1"), "tcp://b:1": ("decode-1", "n2")})
    # decode-0 comes back at another address; decode-1 does not.
    memory.update(at("c"), (), now + S)
    memory.learn({"tcp://c:1": ("decode-0", "n1")})
    (gone,) = Memory(URL).update(at("c"), (), now + 2 * S)
    assert (gone.endpoint.name, gone.host, gone.endpoint.address) == ("decode-1", "n2", "tcp://b:1")


def test_the_file_and_the_folder_are_bounded(cache: Path) -> None:
    now = time.time_ns()
    memory = saved(URL, now, *(f"h{number}" for number in range(MAX_GONE + 50)))
    assert len(memory.update(at("a"), (), now + S)) == MAX_GONE
    for number in range(MAX_FILES + 5):
        saved(f"exec:{number}", now, "a")
    assert len(list(cache.iterdir())) == MAX_FILES
    old = cache / "old.json"
    old.touch()
    os.utime(old, (time.time() - 2 * KEPT_NS / S,) * 2)
    saved("exec:last", now, "a")
    assert not old.exists()
    assert not any("exec" in path.name for path in cache.iterdir())


ROWS = st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=8), st.lists(st.text(max_size=8), max_size=4)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.fixed_dictionaries({"named_ns": st.one_of(st.integers(), st.text()), "agents": ROWS}).map(
            lambda value: json.dumps(value).encode()
        ),
    )
)
def test_a_file_of_any_content_is_nothing_remembered(cache: Path, content: bytes) -> None:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path_of(URL).write_bytes(content)
    memory = Memory(URL)
    endpoints, vanished, _ = memory.last(time.time_ns())
    assert (endpoints, vanished) == ((), ())
    assert memory.update(at("a"), (), time.time_ns()) == ()


def test_a_cache_that_cannot_be_written_costs_nothing(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of the folder")
    saved(URL, time.time_ns(), "a")


def test_a_source_that_does_not_answer_is_replaced_by_what_it_named(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("tcp://a:1\ntcp://b:1\n")
    url = f"file://{path}"

    def find() -> Any:
        sources = AgentSources(NO_KEYS, 60 * S)
        found = sources.find([url])[url]
        sources.learn({})
        sources.close()
        return found

    assert [each.address for each in find().endpoints] == ["tcp://a:1", "tcp://b:1"]
    path.unlink()
    found = find()
    assert [each.address for each in found.endpoints] == ["tcp://a:1", "tcp://b:1"]
    text = found.faults[0].message
    assert re.search(r"there is no such file; asking the 2 agents that it named \d+ s ago", text)
    forget(url)
    assert find().endpoints == ()


def test_vanished_agents_are_shown_by_agents_and_status_and_forgotten_on_request(
    kvctl: Any, fleet: Any, socket_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "list"
    lines = {name: f"{socket_directory}/{name}.sock\n" for name in fleet}
    path.write_text("".join(lines.values()))
    url = f"file://{path}"
    assert kvctl("agents", "-e", url).code == 0
    path.write_text("".join(line for name, line in lines.items() if name != "decode-1"))
    for command in ("agents", "status"):
        outcome = kvctl(command, "-e", url)
        assert outcome.code == 0
        place = re.escape(f"ipc://{socket_directory}/decode-1.sock")
        assert re.search(rf"decode-1 on node-3 vanished \d+ s ago, last at {place}", outcome.err)
    outcome = kvctl("agents", "-e", url, "-o", "json")
    rows = {row["agent"]: row for row in outcome.data}
    assert rows["decode-1"]["state"] == "vanished"
    assert 0 <= rows["decode-1"]["vanished_ns"] < 120 * S
    assert rows["decode-1"]["endpoint"] == f"ipc://{socket_directory}/decode-1.sock"
    assert "vanished" not in kvctl("rooms", "-e", url).err
    assert "forgot 1 vanished agent" in kvctl("agents", "-e", url, "--prune").err
    assert "vanished" not in kvctl("agents", "-e", url).err


def test_one_that_comes_back_at_another_address_has_not_vanished(
    start: Any, socket_directory: Path, tmp_path: Path
) -> None:
    start("decode-0")
    path = tmp_path / "list"
    path.write_text(f"{socket_directory}/decode-0.sock\n")
    url = f"file://{path}"
    with Fleet([url], {}, 60 * S) as fleet:
        assert len(fleet.survey().agents) == 1
    other = tmp_path / "o.sock"
    other.symlink_to(socket_directory / "decode-0.sock")
    path.write_text(f"{other}\n")
    with Fleet([url], {}, 60 * S) as fleet:
        survey = fleet.survey()
    assert [agent.endpoint.address for agent in survey.agents] == [f"ipc://{other}"]
    assert survey.vanished() == []


def test_without_a_home_directory_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, another user could have made the directory of that name, or a link in its place."""

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    memory = saved(URL, time.time_ns(), "a")
    memory.learn({"tcp://a:1": ("decode-0", "n1")})
    assert not path_of(URL).is_relative_to("/tmp")
    assert Memory(URL).last(time.time_ns())[0] == ()
