"""Configuration: precedence of sources, origins of values, and errors that name their source."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME, PLUGIN_PREFIXES, TOOL_VARIABLES, Value
from kvctl_agent.contract.settings import Settings, load_settings
from kvctl_agent.errors import ConfigError


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which no configuration file exists."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "none"), "HOME": str(tmp_path)}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_sources_every_key_has_its_default(nowhere: dict[str, str]) -> None:
    settings = load_settings({}, nowhere)
    assert dict(settings) == {key.name: key.default for key in KEYS}
    assert {settings.origin(name) for name in settings} == {"default"}


def test_each_source_overrides_the_weaker_ones_and_is_the_origin(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'path = "slice"\ncopy_threads = 2\nstaging_ring_mb = 8\n')
    environ = {"KVCTL_COPY_THREADS": "3", "KVCTL_STAGING_RING_MB": "9"}
    defaults = {"path": "bulk", "hold_s": 30}
    settings = load_settings({"staging_ring_mb": 10}, environ, file, defaults)
    assert (settings["hold_s"], settings.origin("hold_s")) == (30, "engine")
    assert (settings["path"], settings.origin("path")) == ("slice", f"file {file}")
    assert (settings["copy_threads"], settings.origin("copy_threads")) == (3, "environment KVCTL_COPY_THREADS")
    assert (settings["staging_ring_mb"], settings.origin("staging_ring_mb")) == (10, "argument")
    assert (settings["transport"], settings.origin("transport")) == ("nixl", "default")


def test_rows_are_the_answer_to_config(nowhere: dict[str, str]) -> None:
    rows = load_settings({"copy_threads": 4}, nowhere).rows()
    assert [row["key"] for row in rows] == [key.name for key in KEYS]
    (copy_threads,) = (row for row in rows if row["key"] == "copy_threads")
    assert (copy_threads["value"], copy_threads["default"], copy_threads["origin"]) == (4, None, "argument")
    assert all(row["help"] for row in rows)


class TestFile:
    def test_the_user_file_is_read_when_there(self, tmp_path: Path) -> None:
        file = write(tmp_path / "kvctl" / "agent.toml", "copy_threads = 7")
        settings = load_settings({}, {"XDG_CONFIG_HOME": str(tmp_path)})
        assert (settings["copy_threads"], settings.origin("copy_threads")) == (7, f"file {file}")

    def test_kvctl_config_names_another_file(self, tmp_path: Path) -> None:
        file = write(tmp_path / "other.toml", "copy_threads = 7")
        write(tmp_path / "kvctl" / "agent.toml", "copy_threads = 8")
        environ = {"XDG_CONFIG_HOME": str(tmp_path), "KVCTL_CONFIG": str(file)}
        assert load_settings({}, environ)["copy_threads"] == 7

    def test_a_file_that_was_asked_for_must_exist(self, tmp_path: Path) -> None:
        missing = tmp_path / "missing.toml"
        with pytest.raises(ConfigError, match=r"missing\.toml does not exist"):
            load_settings({}, {"KVCTL_CONFIG": str(missing)})
        with pytest.raises(ConfigError, match=r"missing\.toml does not exist"):
            load_settings({}, {}, missing)

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"copy_threads = ", r"is not valid TOML: .*\(at (line \d|end of document)"),
            (b"copy_threads = 1\ncopy_threads = 2", r"is not valid TOML: Cannot overwrite"),
            (b"\xff\xfe\x00", "is not valid TOML"),
            (None, "cannot read"),  # a directory
        ],
    )
    def test_what_cannot_be_read(self, tmp_path: Path, content: bytes | None, text: str) -> None:
        file = tmp_path / "a.toml"
        file.mkdir() if content is None else file.write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            load_settings({}, {}, file)

    def test_auto_takes_back_what_is_automatic_by_default(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.toml", 'copy_threads = "auto"')
        settings = load_settings({}, {}, file)
        assert settings["copy_threads"] is None
        assert settings.origin("copy_threads").startswith("file")


class TestUnknownNames:
    def test_each_source_names_the_nearest(self, tmp_path: Path, nowhere: dict[str, str]) -> None:
        file = write(tmp_path / "a.toml", "stagin = 'on'")
        with pytest.raises(ConfigError, match=r"'stagin' \(file .*a\.toml\), did you mean staging"):
            load_settings({}, {}, file)
        with pytest.raises(ConfigError, match=r"'copy_thread' \(argument\), did you mean copy_threads"):
            load_settings({"copy_thread": 1}, nowhere)
        with pytest.raises(ConfigError, match="KVCTL_COPY_THREAD, did you mean KVCTL_COPY_THREADS"):
            load_settings({}, {**nowhere, "KVCTL_COPY_THREAD": "1"})
        with pytest.raises(ConfigError, match=r"'qqqq' \(argument\)$"):
            load_settings({"qqqq": 1}, nowhere)
        with pytest.raises(KeyError, match="did you mean copy_threads"):
            load_settings({}, nowhere)["copy_thread"]

    def test_variables_of_the_tool_are_not_mistakes(self, nowhere: dict[str, str]) -> None:
        environ = {variable: "x" for variable in TOOL_VARIABLES if variable != "KVCTL_CONFIG"}
        assert load_settings({}, {**nowhere, **environ}) == load_settings({}, nowhere)

    def test_variables_of_plugins_are_not_mistakes(self, nowhere: dict[str, str]) -> None:
        environ = {"KVCTL_SGLANG": "observe", "KVCTL_SGLANG_ROLE": "x", "KVCTL_VLLM_HEARTBEAT": "7"}
        assert load_settings({}, {**nowhere, **environ}) == load_settings({}, nowhere)
        assert not [key for key in KEYS if key.environment.startswith(PLUGIN_PREFIXES)]
        with pytest.raises(ConfigError, match="unknown environment variable KVCTL_VLLMX"):
            load_settings({}, {**nowhere, "KVCTL_VLLMX": "1"})

    @pytest.mark.parametrize("service", ["KVCTL", "KVCTL_PREFILL", "KVCTL_STAGING", "KVCTL_SGLANG"])
    def test_variables_of_kubernetes_services_are_not_mistakes(self, nowhere: dict[str, str], service: str) -> None:
        links = {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "14579",
            "SERVICE_PORT_BOOTSTRAP": "14579",
            "PORT": "tcp://10.0.0.1:14579",
        }
        for protocol in ("tcp", "udp", "sctp"):
            port = f"PORT_14579_{protocol.upper()}"
            links[port] = f"{protocol}://[fd00::1]:14579"
            links |= {f"{port}_ADDR": "fd00::1", f"{port}_PORT": "14579", f"{port}_PROTO": protocol}
        environ = {f"{service}_{name}": value for name, value in links.items()}
        assert load_settings({}, {**nowhere, **environ}) == load_settings({}, nowhere)

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("KVCTL_METRICS_PORT", "9000"), ("KVCTL_PORT", ""), ("KVCTL_SERVICE", "x"), ("KVCTL_PORT_A_TCP", "tcp://a:1")],
    )
    def test_what_kubernetes_would_not_set_is_a_mistake(
        self, nowhere: dict[str, str], variable: str, value: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"unknown environment variable {variable}"):
            load_settings({}, {**nowhere, variable: value})


TAKEN = [
    ("environment", "copy_threads", "64", 64),
    ("environment", "copy_threads", "auto", None),
    ("environment", "heartbeat_s", "0.5", 0.5),
    ("environment", "heartbeat_s", "2", 2.0),
    ("environment", "heartbeat_s", "5e-1", 0.5),
    ("environment", "path", "bulk", "bulk"),
    ("environment", "transport_params", "a=1,b=2", "a=1,b=2"),
    ("environment", "transport_params", "", ""),
    ("argument", "heartbeat_s", 2, 2.0),
    ("argument", "copy_threads", None, None),
    ("argument", "chunk_tokens", np.int64(64), 64),
    ("argument", "copy_threads", np.uint8(2), 2),
    ("argument", "lost_s", np.float64(20.5), 20.5),
    ("argument", "lost_s", np.int32(20), 20.0),
]
WRONG = {
    ("environment", "copy_threads"): ["64.0", "", " 2", "2 ", "0x2", "1_0", "٣", "1e1", "two", "-1", "65", "9" * 99],
    ("environment", "heartbeat_s"): ["nan", "inf", "-inf", "1e999", "1,5", "", "0.01", "61"],
    ("file", "copy_threads"): ['"2"', "2.0", "true", "[2]", "{a = 2}"],
    ("argument", "copy_threads"): ["2", 2.0, True, -1, 65, [2]],
    ("argument", "heartbeat_s"): [math.nan, math.inf, True, 10**400, "1"],
    ("argument", "chunk_tokens"): [np.bool_(True), np.float64(64)],
    ("argument", "checksum"): [np.bool_(True)],
    ("argument", "transport"): [None],
}
TAKES = {"copy_threads": "an int from 0 to 64, or auto", "heartbeat_s": r"a number from 0\.05 to 60 s"}


def loaded(nowhere: dict[str, str], source: str, key: str, value: Any) -> Settings:
    if source == "file":
        return load_settings({}, nowhere, write(Path(nowhere["HOME"]) / "a.toml", f"{key} = {value}"))
    if source == "environment":
        return load_settings({}, {**nowhere, f"KVCTL_{key.upper()}": value})
    return load_settings({key: value}, nowhere)


@pytest.mark.parametrize(("source", "key", "value", "wanted"), TAKEN)
def test_a_value_that_is_taken(nowhere: dict[str, str], source: str, key: str, value: Any, wanted: Value) -> None:
    found = loaded(nowhere, source, key, value)[key]
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("source", "key", "value"), [(*where, value) for where, values in WRONG.items() for value in values]
)
def test_a_value_that_is_refused_with_its_source(nowhere: dict[str, str], source: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = .* \({source}.*\) is not allowed: it takes {TAKES.get(key, '')}"):
        loaded(nowhere, source, key, value)


def test_a_wrong_choice_names_the_right_ones_and_the_nearest(nowhere: dict[str, str]) -> None:
    expected = r"path = 'stage' \(argument\) .* one of auto, bulk, slice, staged, direct, did you mean staged"
    with pytest.raises(ConfigError, match=expected):
        load_settings({"path": "stage"}, nowhere)


def test_none_overrides_weaker_sources(nowhere: dict[str, str]) -> None:
    assert load_settings({"copy_threads": None}, {**nowhere, "KVCTL_COPY_THREADS": "2"})["copy_threads"] is None


class TestTogether:
    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            ({"heartbeat_s": 3.0}, "heartbeat_s = 3 .argument. must be less than suspect_s = 3 .default."),
            ({"lost_s": 2.0}, "suspect_s = 3 .default. must be less than lost_s = 2 .argument."),
            ({"lost_s": 3.0}, "suspect_s = 3 .default. must be less than lost_s = 3 .argument."),
        ],
    )
    def test_heartbeat_suspect_lost_grow(
        self, nowhere: dict[str, str], arguments: dict[str, Value], names: str
    ) -> None:
        with pytest.raises(ConfigError, match=names):
            load_settings(arguments, nowhere)

    def test_fewest_groups_are_no_more_than_most(self, nowhere: dict[str, str]) -> None:
        names = "pipeline_min_iters = 11 .argument. must not exceed pipeline_max_iters = 10 .default."
        with pytest.raises(ConfigError, match=names):
            load_settings({"pipeline_min_iters": 11}, nowhere)
        assert load_settings({"pipeline_min_iters": 10}, nowhere)["pipeline_max_iters"] == 10


@given(st.dictionaries(st.sampled_from([key.environment for key in KEYS]), st.text(max_size=12)))
def test_whatever_the_environment_holds_it_is_valid_settings_or_a_config_error(environ: dict[str, str]) -> None:
    try:
        settings = load_settings({}, {"XDG_CONFIG_HOME": "/nonexistent", **environ})
    except ConfigError:
        return
    assert isinstance(settings, Settings)
    for name, value in settings.items():
        key = KEYS_BY_NAME[name]
        assert value is None or type(value) is key.type
        assert not key.choices or value in key.choices
