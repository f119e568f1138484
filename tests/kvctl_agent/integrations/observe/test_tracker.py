"""Names of this host's ranks, as their peers look them up."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.integrations.observe import tracker
from kvctl_agent.integrations.observe.tracker import RankNames

ENDPOINT = "10.0.0.2:5"


def test_a_rank_whose_lock_file_comes_after_its_first_message_is_found_after_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(tracker, "monotonic", lambda: now)
    names = RankNames(tmp_path)
    assert names.name_of(ENDPOINT) == ENDPOINT
    lock = tmp_path / f"decode-0{LOCK_SUFFIX}"
    lock.write_text(f"1\n{ENDPOINT}")
    now += 9
    assert names.name_of(ENDPOINT) == ENDPOINT  # the files are not read at each event
    now += 1
    assert names.name_of(ENDPOINT) == "decode-0"
    lock.unlink()
    now += 3600
    assert names.name_of(ENDPOINT) == "decode-0"


def test_peers_that_start_again_do_not_fill_memory(tmp_path: Path) -> None:
    names = RankNames(tmp_path)
    for number in range(5000):
        names.name_of(f"agent-{number}")
    assert len(names._names) == 4096
