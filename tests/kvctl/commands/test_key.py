"""`kvctl key new` and `-e tcp://`: modes of the files, and the error and exit code of each mistake with keys."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.exit_codes import ExitCode
from kvctl_agent.host.keys import read_pair, read_public
from tests.kvctl.client.discovery.conftest import agents, keys
from tests.support.admin_server import AdminServer

__all__ = ["agents", "keys"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate configuration directory for the keys of the test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "kvctl" / "keys"


class TestNew:
    def test_the_secret_is_ours_alone_and_is_not_printed(self, home: Path, kvctl: Any) -> None:
        before = os.umask(0)
        try:
            outcome = kvctl("key", "new")
        finally:
            os.umask(before)
        assert (outcome.code, outcome.err) == (0, "")
        secret, public = home / "default.key", home / "default.pub"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (home, secret, public)] == [0o700, 0o600, 0o644]
        pair = read_pair(secret)
        assert pair.public == read_public(str(public))
        assert pair.public.hex() in outcome.out
        assert pair.secret.hex() not in outcome.out + public.read_text()

    def test_a_path_in_place_of_a_name(self, tmp_path: Path, kvctl: Any) -> None:
        assert kvctl("key", "new", str(tmp_path / "there" / "my.key")).code == 0
        assert {path.name for path in (tmp_path / "there").iterdir()} == {"my.key", "my.pub"}
        assert kvctl("key", "new", str(tmp_path / "my")).code == ExitCode.USAGE

    @pytest.mark.parametrize("kept", ["default.key", "default.pub"])
    def test_nothing_is_overwritten(self, home: Path, kvctl: Any, kept: str) -> None:
        home.mkdir(parents=True)
        (home / kept).write_text("precious")
        outcome = kvctl("key", "new")
        assert outcome.code == ExitCode.FAILED
        assert f"{home / kept} exists and is not overwritten" in outcome.err
        assert [(path.name, path.read_text()) for path in home.iterdir()] == [(kept, "precious")]

    def test_a_place_that_cannot_be_written(self, tmp_path: Path, kvctl: Any) -> None:
        (tmp_path / "file").touch()
        outcome = kvctl("key", "new", str(tmp_path / "file" / "a.key"))
        assert outcome.code == ExitCode.FAILED
        assert "cannot write" in outcome.err


@pytest.fixture
def agent(agents: Callable[[str], AdminServer], kvctl: Any) -> AdminServer:
    """decode-0, where the default key has the level read."""
    assert kvctl("key", "new", "stranger").code == 0
    return agents("decode-0")


class TestAsking:
    def test_with_the_right_keys_everything_works_as_on_the_machine_itself(
        self, home: Path, kvctl: Any, agent: AdminServer
    ) -> None:
        outcome = kvctl("-e", agent.remote_address, "--server-key", str(home / "fleet.pub"), "agents", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "")
        (row,) = outcome.data
        assert (row["agent"], row["level"], row["endpoint"]) == ("decode-0", "read", agent.remote_address)

    def test_a_strangers_key_exits_5_and_names_it(self, home: Path, kvctl: Any, agent: AdminServer) -> None:
        outcome = self.ask(kvctl, agent, "--server-key", str(home / "fleet.pub"), "--key", "stranger")
        assert outcome.code == ExitCode.NOT_PERMITTED
        assert f"refuses this client's key {read_public(str(home / 'stranger.pub')).hex()}" in outcome.err
        assert "admin_clients" in outcome.err

    @pytest.mark.parametrize("name", ["fleet.pub", "fleet"])
    def test_a_server_key_is_found_in_the_key_directory(
        self, home: Path, kvctl: Any, agent: AdminServer, name: str
    ) -> None:
        assert self.ask(kvctl, agent, "--server-key", name).code == 0

    def test_nobody_there_exits_3(self, home: Path, kvctl: Any, agent: AdminServer) -> None:
        agent.close()
        outcome = self.ask(kvctl, agent, "--server-key", str(home / "fleet.pub"))
        assert outcome.code == ExitCode.NO_AGENT
        assert "nobody listens there" in outcome.err

    def test_somebody_who_says_nothing_exits_4_after_the_timeout(self, home: Path, kvctl: Any) -> None:
        kvctl("key", "new")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            began = time.monotonic()
            outcome = kvctl("-e", address, "--server-key", str(home / "default.pub"), "--timeout", "300ms", "status")
        assert outcome.code == ExitCode.TIMEOUT
        assert time.monotonic() - began >= 0.3

    def test_one_that_refuses_does_not_spoil_the_others(self, home: Path, kvctl: Any, agent: AdminServer) -> None:
        outcome = kvctl(
            "-e", "decode-0", "-e", agent.remote_address, "--key", "stranger", "--server-key",
            str(home / "fleet.pub"), "agents",
        )  # fmt: skip
        assert outcome.code == ExitCode.PARTIAL
        assert "admin" in kvctl("-e", "decode-0", "agents", "-o", "wide").out

    @staticmethod
    def ask(kvctl: Any, agent: AdminServer, *keys: str, command: str = "status") -> Any:
        address = agent.remote_address
        began = time.monotonic()
        outcome = kvctl("-e", address, *keys, "--timeout", "60s", command)
        assert time.monotonic() - began < 30  # the error is printed at once
        return outcome


class TestMistakes:
    ADDRESS = "tcp://127.0.0.1:9"

    def test_no_server_key(self, kvctl: Any) -> None:
        kvctl("key", "new")
        outcome = kvctl("-e", self.ADDRESS, "status")
        assert outcome.code == ExitCode.USAGE
        assert "--server-key" in outcome.err

    @pytest.mark.parametrize("address", ["tcp://x", "tcp://:7", "tcp://x:*", "tcp://x:0", "tcp://x:70000", "udp://x:1"])
    def test_what_is_no_address(self, kvctl: Any, address: str) -> None:
        assert kvctl("-e", address, "status").code == ExitCode.USAGE
