"""Sources that do not answer, and the files that remember what they named."""

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

from kvctl.client.discovery.memory import KEPT_NS, MAX_FILES, path_of, recall, remember
from kvctl.client.discovery.source import AgentSources
from kvctl.client.endpoints import Endpoint
from kvctl.client.keys import NO_KEYS

S = 1_000_000_000
URL = "file:///list"
AGENT = Endpoint("decode-0", None, True, "tcp://a:1", "n1")


@pytest.fixture(autouse=True)
def cache(surroundings: None) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "kvctl" / "agents"


def test_what_a_source_named_is_known_for_a_day(cache: Path) -> None:
    now = time.time_ns()
    remember(URL, [AGENT], now)
    assert recall(URL, now + KEPT_NS) == ((AGENT,), now)
    assert recall(URL, now + KEPT_NS + 1) == ((), 0)
    assert stat.S_IMODE(path_of(URL).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_folder_is_bounded(cache: Path) -> None:
    for number in range(MAX_FILES + 5):
        remember(f"file:///secret-{number}", [AGENT], 1)
    assert len(list(cache.iterdir())) == MAX_FILES
    old = cache / "old.json"
    old.touch()
    os.utime(old, (time.time() - 2 * KEPT_NS / S,) * 2)
    remember(URL, [AGENT], 1)
    assert not old.exists()
    assert not any("secret" in path.name for path in cache.iterdir())


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
    assert recall(URL, time.time_ns())[0] == ()


def test_a_cache_that_cannot_be_written_costs_nothing(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of the folder")
    remember(URL, [AGENT], 1)


def test_a_source_that_does_not_answer_is_replaced_by_what_it_named(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("tcp://a:1\ntcp://b:1\n")
    url = f"file://{path}"

    def find() -> Any:
        sources = AgentSources(NO_KEYS, 60 * S)
        found = sources.find([url])[url]
        sources.close()
        return found

    assert [each.address for each in find().endpoints] == ["tcp://a:1", "tcp://b:1"]
    path.unlink()
    found = find()
    assert [each.address for each in found.endpoints] == ["tcp://a:1", "tcp://b:1"]
    text = found.faults[0].message
    assert re.search(r"there is no such file; asking the 2 agents that it named \d+ s ago", text)


def test_without_a_home_directory_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, another user could have made the directory of that name, or a link in its place."""

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    remember(URL, [AGENT], time.time_ns())
    assert not path_of(URL).is_relative_to("/tmp")
    assert recall(URL, time.time_ns())[0] == ()
