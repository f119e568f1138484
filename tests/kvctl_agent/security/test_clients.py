"""The file of clients while it changes: a key taken out is out at once, a broken file lets nobody in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvctl_agent.contract.commands import Level
from kvctl_agent.host.keys import KeyFileError
from kvctl_agent.security.curve import Clients

ALICE, BOB = b"a" * 32, b"b" * 32


def write(path: Path, *lines: str) -> None:
    """As an editor does: a new file in the place of the old one, with a time of its own."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.chmod(0o600)
    new.replace(path)


def test_levels_follow_the_file(tmp_path: Path) -> None:
    path, complaints = tmp_path / "clients", list[str]()
    write(path, f"read {ALICE.hex()} alice")
    clients = Clients(path, complaints.append)
    assert (clients.level(ALICE), clients.level(BOB)) == (Level.READ, None)
    write(path, f"operate {ALICE.hex()} alice", f"admin {BOB.hex()} bob")
    assert (clients.level(ALICE), clients.level(BOB)) == (Level.OPERATE, Level.ADMIN)
    write(path, f"admin {BOB.hex()} bob")
    assert clients.level(ALICE) is None
    assert complaints == []


def test_while_the_file_is_broken_or_gone_nobody_is_let_in_and_it_is_told_once(tmp_path: Path) -> None:
    path, complaints = tmp_path / "clients", list[str]()
    write(path, f"read {ALICE.hex()} alice")
    clients = Clients(path, complaints.append)
    write(path, f"read {ALICE.hex()} alice", "rubbish")
    assert [clients.level(ALICE) for _ in range(3)] == [None] * 3
    assert len(complaints) == 1
    assert "line 2" in complaints[0]
    path.unlink()
    assert clients.level(ALICE) is None
    assert len(complaints) == 2
    write(path, f"read {ALICE.hex()} alice")
    assert clients.level(ALICE) is Level.READ


def test_a_change_of_mode_alone_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    write(path, f"read {ALICE.hex()} alice")
    clients = Clients(path, lambda _: None)
    os.chmod(path, 0o622)  # noqa: PTH101
    assert clients.level(ALICE) is None


def test_at_the_start_a_broken_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read"):
        Clients(tmp_path / "none", lambda _: None)
