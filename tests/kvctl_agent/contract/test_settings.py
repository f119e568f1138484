"""Configuration: precedence of sources, origins of values, and errors that name their source."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME, PLUGIN_PREFIXES, TOOL_VARIABLES, Value
from kvctl_agent.contract.settings import Settings, allowed, load_settings
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
        "text", ["copy_threads = ", "copy_threads", "[a", "copy_threads = 1\ncopy_threads = 2", 'x = "\\q"']
    )
    def test_what_is_not_toml_says_where(self, tmp_path: Path, text: str) -> None:
        file = write(tmp_path / "a.toml", text)
        with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML: .*\(at (line \d|end of document)"):
            load_settings({}, {}, file)

    def test_bytes_that_are_not_text(self, tmp_path: Path) -> None:
        file = tmp_path / "a.toml"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not valid TOML"):
            load_settings({}, {}, file)

    def test_a_directory_in_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read"):
            load_settings({}, {}, tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            'copy_threads = "2"',
            "copy_threads = 2.0",
            "copy_threads = true",
            "copy_threads = [2]",
            "copy_threads = {a = 2}",
        ],
    )
    def test_types_are_not_converted(self, tmp_path: Path, text: str) -> None:
        file = write(tmp_path / "a.toml", text)
        with pytest.raises(ConfigError, match=r"copy_threads = .*a\.toml.*takes an int from 0 to 64, or auto"):
            load_settings({}, {}, file)

    def test_auto_takes_back_what_is_automatic_by_default(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.toml", 'copy_threads = "auto"')
        settings = load_settings({}, {}, file)
        assert settings["copy_threads"] is None
        assert settings.origin("copy_threads").startswith("file")


class TestUnknownNames:
    def test_in_the_file(self, tmp_path: Path) -> None:
        file = write(tmp_path / "a.toml", "stagin = 'on'")
        with pytest.raises(ConfigError, match=r"'stagin' \(file .*a\.toml\), did you mean staging"):
            load_settings({}, {}, file)

    def test_in_the_arguments(self, nowhere: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"'copy_thread' \(argument\), did you mean copy_threads"):
            load_settings({"copy_thread": 1}, nowhere)

    def test_in_the_environment(self, nowhere: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match="KVCTL_COPY_THREAD, did you mean KVCTL_COPY_THREADS"):
            load_settings({}, {**nowhere, "KVCTL_COPY_THREAD": "1"})

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

    def test_no_key_and_no_option_has_such_a_name(self) -> None:
        names = [key.environment for key in KEYS] + list(TOOL_VARIABLES)
        assert not [name for name in names if re.search("_SERVICE_HOST|_SERVICE_PORT|_PORT(_|$)", name)]

    @pytest.mark.parametrize(
        ("variable", "value"),
        [("KVCTL_METRICS_PORT", "9000"), ("KVCTL_PORT", ""), ("KVCTL_SERVICE", "x"), ("KVCTL_PORT_A_TCP", "tcp://a:1")],
    )
    def test_what_kubernetes_would_not_set_is_a_mistake(
        self, nowhere: dict[str, str], variable: str, value: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"unknown environment variable {variable}"):
            load_settings({}, {**nowhere, variable: value})

    def test_no_variable_of_the_tool_is_a_keys_variable(self) -> None:
        assert not {key.environment for key in KEYS} & set(TOOL_VARIABLES)

    def test_nothing_close_suggests_nothing(self, nowhere: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"'qqqq' \(argument\)$"):
            load_settings({"qqqq": 1}, nowhere)

    def test_reading_one_is_a_key_error_with_a_suggestion(self, nowhere: dict[str, str]) -> None:
        with pytest.raises(KeyError, match="did you mean copy_threads"):
            load_settings({}, nowhere)["copy_thread"]


class TestValues:
    @pytest.mark.parametrize(
        ("variable", "text", "value"),
        [
            ("KVCTL_COPY_THREADS", "64", 64),
            ("KVCTL_COPY_THREADS", "auto", None),
            ("KVCTL_HEARTBEAT_S", "0.5", 0.5),
            ("KVCTL_HEARTBEAT_S", "2", 2.0),
            ("KVCTL_HEARTBEAT_S", "5e-1", 0.5),
            ("KVCTL_PATH", "bulk", "bulk"),
            ("KVCTL_TRANSPORT_PARAMS", "a=1,b=2", "a=1,b=2"),
            ("KVCTL_TRANSPORT_PARAMS", "", ""),
        ],
    )
    def test_text_that_is_taken(self, nowhere: dict[str, str], variable: str, text: str, value: Value) -> None:
        settings = load_settings({}, {**nowhere, variable: text})
        name = variable.removeprefix("KVCTL_").lower()
        assert settings[name] == value
        assert type(settings[name]) is type(value)

    @pytest.mark.parametrize("text", ["64.0", "", " 2", "2 ", "0x2", "1_0", "٣", "1e1", "two", "-1", "65", "9" * 99])
    def test_text_that_is_no_thread_count(self, nowhere: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigError, match=r"environment KVCTL_COPY_THREADS.*an int from 0 to 64"):
            load_settings({}, {**nowhere, "KVCTL_COPY_THREADS": text})

    @pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "1,5", "", "0.01", "61"])
    def test_text_that_is_no_heartbeat(self, nowhere: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigError, match=r"environment KVCTL_HEARTBEAT_S.*a number from 0\.05 to 60 s"):
            load_settings({}, {**nowhere, "KVCTL_HEARTBEAT_S": text})

    def test_a_wrong_choice_names_the_right_ones_and_the_nearest(self, nowhere: dict[str, str]) -> None:
        expected = r"path = 'stage' \(argument\) .* one of auto, bulk, slice, staged, direct, did you mean staged"
        with pytest.raises(ConfigError, match=expected):
            load_settings({"path": "stage"}, nowhere)

    @pytest.mark.parametrize("value", ["2", 2.0, True, -1, 65, [2]])
    def test_arguments_are_not_converted(self, nowhere: dict[str, str], value: Value) -> None:
        with pytest.raises(ConfigError, match=r"copy_threads = .* \(argument\)"):
            load_settings({"copy_threads": value}, nowhere)

    @pytest.mark.parametrize("value", [math.nan, math.inf, True, 10**400, "1"])
    def test_arguments_that_are_no_number(self, nowhere: dict[str, str], value: Value) -> None:
        with pytest.raises(ConfigError, match=r"heartbeat_s = .* \(argument\)"):
            load_settings({"heartbeat_s": value}, nowhere)

    def test_an_int_is_a_number(self, nowhere: dict[str, str]) -> None:
        assert type(load_settings({"heartbeat_s": 2}, nowhere)["heartbeat_s"]) is float

    def test_none_is_automatic_only_where_that_is_the_default(self, nowhere: dict[str, str]) -> None:
        assert load_settings({"copy_threads": None}, {**nowhere, "KVCTL_COPY_THREADS": "2"})["copy_threads"] is None
        with pytest.raises(ConfigError, match="transport = None"):
            load_settings({"transport": None}, nowhere)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("chunk_tokens", np.int64(64), 64),
        ("copy_threads", np.uint8(2), 2),
        ("lost_s", np.float64(20.5), 20.5),
        ("lost_s", np.int32(20), 20.0),
    ],
)
def test_numbers_of_numpy_become_pythons(nowhere: dict[str, str], key: str, value: Any, wanted: Value) -> None:
    found = load_settings({key: value}, nowhere)[key]
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("key", "value"), [("checksum", np.bool_(True)), ("chunk_tokens", np.bool_(True)), ("chunk_tokens", np.float64(64))]
)
def test_what_is_no_integer_is_refused_by_name(nowhere: dict[str, str], key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = np\..* \(argument\) is not allowed: it takes "):
        load_settings({key: value}, nowhere)


class TestTogether:
    @pytest.mark.parametrize(
        ("arguments", "names"),
        [
            ({"heartbeat_s": 3.0}, "heartbeat_s = 3 .argument. must be less than suspect_s = 3 .default."),
            ({"lost_s": 2.0}, "suspect_s = 3 .default. must be less than lost_s = 2 .argument."),
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

    def test_across_sources(self, nowhere: dict[str, str]) -> None:
        with pytest.raises(ConfigError, match=r"environment KVCTL_HEARTBEAT_S.*must be less"):
            load_settings({"suspect_s": 4.0}, {**nowhere, "KVCTL_HEARTBEAT_S": "5"})


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


def test_what_is_allowed_reads_as_a_sentence() -> None:
    assert allowed(KEYS_BY_NAME["copy_threads"]) == "an int from 0 to 64, or auto"
    assert allowed(KEYS_BY_NAME["staging_ring_mb"]) == "an int from 1 to 1048576 MiB"
    assert allowed(KEYS_BY_NAME["pipeline"]) == "one of off, on, auto"
