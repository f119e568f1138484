"""The declarations of the contract are consistent, and it imports only the standard library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl_agent.contract import admin, snapshots
from kvctl_agent.contract.commands import COMMANDS, Level
from kvctl_agent.contract.config import KEYS, Key
from kvctl_agent.contract.metrics import METRICS, Metric
from kvctl_agent.contract.settings import load_settings


def test_every_default_is_itself_a_valid_value() -> None:
    arguments = {key.name: key.default for key in KEYS}
    settings = load_settings(arguments, {"XDG_CONFIG_HOME": "/nonexistent"})
    assert {settings.origin(name) for name in settings} == {"argument"}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_key(key: Key) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", key.name)
    assert key.type in (str, int, float, bool)
    assert key.help.endswith(".")
    assert not (key.choices and key.type is not str)
    if key.type in (int, float):
        assert key.minimum is not None
        assert key.maximum is not None
        assert key.minimum < key.maximum


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metric_names_follow_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"kvctl_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert "room" not in metric.labels
    if metric.unit:
        assert metric.unit in metric.name


def test_reading_commands_need_no_more_than_read() -> None:
    more = {command.name: command.level for command in COMMANDS if command.level is not Level.READ}
    acts = dict.fromkeys(("abort", "release", "forget", "drain", "resume", "probe"), Level.OPERATE)
    assert more == {**acts, "set": Level.ADMIN}
    assert Level.READ < Level.OPERATE < Level.ADMIN


def test_times_and_sizes_say_their_unit_in_their_name() -> None:
    shapes = [value for value in vars(snapshots).values() if isinstance(value, type) and hasattr(value, "__total__")]
    assert len(shapes) > 20
    for shape in shapes:
        for name in shape.__annotations__:
            if name.endswith("_per_s"):
                continue
            assert not name.endswith(("_ms", "_us", "_s", "_sec", "_mb", "_kb", "_seconds")), f"{shape}.{name}"


class TestSocketPath:
    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
    def test_a_name_that_leaves_the_directory(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match="file name"):
            admin.socket_path(name, tmp_path)

    def test_the_length_limit_is_to_the_byte_and_counts_bytes(self) -> None:
        directory = Path("/tmp")
        room = admin.MAX_SOCKET_PATH_BYTES - len("/tmp/.sock")
        assert len(str(admin.socket_path("n" * room, directory))) == 107
        with pytest.raises(ValueError, match=r"has 108 bytes.*at most 107"):
            admin.socket_path("n" * (room + 1), directory)
        with pytest.raises(ValueError, match="at most 107"):
            admin.socket_path("ü" * (room // 2 + 1), directory)

    def test_where_sockets_live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
        monkeypatch.setenv("KVCTL_SOCKET_DIR", "/x")
        assert admin.socket_dir() == Path("/x")
        monkeypatch.delenv("KVCTL_SOCKET_DIR")
        assert admin.socket_dir() == Path("/run/user/7/kvctl")


def test_the_contract_imports_nothing_heavy() -> None:
    script = (
        "import sys, kvctl_agent.contract.settings, kvctl_agent.contract.admin, kvctl_agent.contract.commands,"
        "kvctl_agent.contract.metrics, kvctl_agent.contract.snapshots, kvctl_agent.contract.states;"
        "print(sorted(m for m in ('torch', 'numpy', 'zmq', 'msgspec', 'nixl', 'rich', 'click') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
