"""Fleets of real SGLang servers, one for each mode in turn, and the tokens of an undivided server.

Servers run on the CPU, or on GPUs with SGLANG_GPUS=2 (1: those with one rank each): there with overlap scheduling, CUDA
graphs of decode, and schedulers that spin when idle, as by default, but without SGLang's wheels of kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvctl.lab.bench.sglang_checkpoint import Llama, write_checkpoint
from kvctl.lab.bench.sglang_servers import CPU_FLAGS, Process, Tokens, cpu_environment, generation
from kvctl.lab.tcp_ports import free_port
from tests.support.observers import end_observer
from tests.support.sglang_fleet import COMMON_FLAGS, Fleet, Prefill, post
from tests.support.trace_receiver import Receiver, receiving

# What SGLang gets as --disaggregation-transfer-backend and as KVCTL_SGLANG.
MODES = {
    "nixl": ("nixl", "off"),
    "kvctl": ("kvctl", "backend"),
    "replace": ("nixl", "replace"),
    "observe": ("nixl", "observe"),
}
HERE = Path(__file__).parent
GPUS = int(os.environ.get("SGLANG_GPUS", "0"))
# What these servers need beside flags. The plugin is that of this checkout, wherever the installed one is from.
ENVIRONMENT = {"KVCTL_OBSERVER": "process"}
if GPUS:
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    # Several servers share a GPU, so that its free memory changes while one starts.
    ENVIRONMENT["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
else:
    ENVIRONMENT |= cpu_environment(ranks=16)
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(HERE / "site"), str(HERE.parents[1])])
    ENVIRONMENT["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "tiny_models"
# float32, as on the CPU: the order of a sum changes no token.
GPU_FLAGS = (
    *("--dtype", "float32", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-custom-all-reduce", "--mem-fraction-static", "0.1"),
    *("--cuda-graph-max-bs-decode", "16", "--cuda-graph-backend-prefill", "disabled"),
)
# Prompts that are longer than this are prefilled in chunks.
CHUNK_TOKENS = 64
# Of the bootstrap server of the decode server that becomes a prefill server.
SWITCH_PORT = free_port()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Servers outlive the test that starts them again."""


@pytest.fixture(autouse=True)
def socket_dir() -> None:
    """The directory of admin sockets belongs to the fleet."""


@pytest.fixture(scope="session", autouse=True)
def batch_policy() -> Iterator[None]:
    """Lets servers inherit SCHED_BATCH, so that a thread that wakes up does not take another one's core.

    Two ranks with DP attention wake each other all the time. On two cores with Linux 6.18 they and their gloo threads
    left hardly anything of either core for as long as 28 s, so that other servers, and their agents, stood still.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture(scope="session")
def python() -> Path:
    """That of the environment with SGLang: on a GPU this one."""
    return Path(sys.executable) if GPUS else Path(os.environ["SGLANG_VENV"]) / "bin" / "python"


@pytest.fixture(scope="session")
def folder() -> Path:
    """Checkpoint, logs and admin sockets; short enough for sun_path."""
    path = Path(tempfile.mkdtemp(prefix="kv-sglang-", dir="/tmp"))
    print(f"logs: {path}")
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    write_checkpoint(folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def qwen3(folder: Path) -> Path:
    """As `model`, a Qwen3: SGLang's Llama has no DP attention."""
    write_checkpoint(folder / "qwen3", shape=Llama(qwen3=True))
    return folder / "qwen3"


@pytest.fixture(scope="session")
def deep(folder: Path) -> Path:
    """As `model`, with layers enough to be sent in groups."""
    path = folder / "deep"
    write_checkpoint(path, layers=8)
    return path


class Undivided:
    """The server that does prefill and decode; it is asked once for each prompt."""

    def __init__(self, server: Process) -> None:
        self._server = server
        self._known: dict[tuple[tuple[int, ...], int], Tokens] = {}

    def tokens(self, prompt: Tokens, new_tokens: int = 16) -> Tokens:
        key = (tuple(prompt), new_tokens)
        if key not in self._known:
            reply = post(f"{self._server.url}/generate", generation(prompt, new_tokens))
            self._known[key] = reply["output_ids"]
        return self._known[key]


def fleet_of(python: Path, model: Path, folder: Path, environment: dict[str, str], overlap: bool = False) -> Fleet:
    """Returns a fleet without servers; `overlap`: with overlap scheduling also on the CPU."""
    if GPUS:
        common = [flag for flag in COMMON_FLAGS if flag != "--sleep-on-idle"]
        return Fleet(python, model, folder, GPU_FLAGS, environment, common)
    if overlap:
        # SGLang orders a prefix that it sends early behind a CUDA event, which a CPU does not have.
        environment = {**environment, "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}
    flags = [flag for flag in CPU_FLAGS if not (overlap and flag == "--disable-overlap-schedule")]
    return Fleet(python, model, folder, flags, environment)


def placed(flags: Sequence[str], gpu: int) -> Sequence[str]:
    """Returns a server's flags with its first GPU, unless it has a rank on each."""
    return (*flags, "--base-gpu-id", str(min(gpu, GPUS - 1))) if GPUS and "2" not in flags else flags


@pytest.fixture(scope="session")
def undivided(python: Path, model: Path, folder: Path) -> Iterator[Undivided]:
    fleet = fleet_of(python, model, folder, {**ENVIRONMENT, "KVCTL_SGLANG": "off"})
    server = fleet.server("undivided")
    with fleet:
        yield Undivided(server)


@dataclass(frozen=True)
class Servers:
    """A fleet in one mode. Servers are named after their parallel sizes or another option."""

    mode: str
    fleet: Fleet
    socket_dir: Path
    prefills: dict[str, Prefill]
    decodes: dict[str, Process]
    router: Process
    alone: Undivided | None  # the undivided server of a fleet that has a model of its own

    def pair(self, name: str) -> tuple[Prefill, Process]:
        """Returns the servers of a pair such as tp2-tp1."""
        prefill, decode = name.split("-")
        return self.prefills[prefill], self.decodes[decode]


# Flags of the servers of each name: chunked prefill and the radix cache of decode where they cost no server more. DP
# attention exchanges logits by an operator that CPUs lack, unless each dp rank has the whole head.
PREFILLS = {
    "tp1": ("--chunked-prefill-size", str(CHUNK_TOKENS)),
    "tp2": ("--tp-size", "2"),
    "dp2": ("--dp-size", "2"),
    "attention2": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"),
    "pp2": ("--pp-size", "2"),
    "overlap": ("--disaggregation-enable-kv-checksum",),
    "optimistic": ("--optimistic-prefill-attempts", "1", "--enable-pd-role-switch"),
    "switch": ("--enable-pd-role-switch", "--disaggregation-decode-enable-radix-cache"),
    "layers": ("--chunked-prefill-size", str(CHUNK_TOKENS)),
    "layers2": ("--chunked-prefill-size", str(CHUNK_TOKENS), "--tp-size", "2"),
    # A pool that two prompts fill, and a host pool for all others; the copies that have a stand-in on the CPU.
    "layers-hicache": (
        *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", "1024"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "8"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    ),
}
DECODES = {
    "tp1": ("--disaggregation-decode-enable-radix-cache",),
    "plain": (),
    "tp2": ("--tp-size", "2"),
    "dp2": ("--dp-size", "2"),
    "attention2": PREFILLS["attention2"],
    "pp2": ("--pp-size", "2"),
    "overlap": ("--disaggregation-decode-enable-radix-cache", "--disaggregation-enable-kv-checksum"),
    "switch": (*PREFILLS["switch"], "--disaggregation-bootstrap-port", str(SWITCH_PORT)),
}
# The fleet whose spans are exported.
TRACED = "tp1+tp2-tp1"
# Prefill and decode servers of the fleets. Few at a time: the threads of an idle rank wake a thousand times a second.
FLEETS = {
    TRACED: (("tp1", "tp2"), ("tp1",)),
    "tp1-tp2+dp2": (("tp1",), ("tp2", "dp2")),
    "dp2-tp1": (("dp2",), ("tp1",)),
    "tp1+attention2-attention2": (("tp1", "attention2"), ("attention2",)),
    "pp2-tp1+pp2": (("pp2",), ("tp1", "pp2")),
    "overlap-overlap": (("overlap",), ("overlap",)),
    "optimistic-tp1": (("optimistic",), ("tp1",)),
    "switch-switch": (("switch",), ("switch",)),
    "layers-tp1": (("layers",), ("tp1",)),
    "layers2-overlap": (("layers2",), ("tp1",)),
    "layers-hicache": (("layers-hicache",), ("plain",)),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "modes(*names, reason): the modes in which a test runs, and why in no others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests so that each fleet starts once; those that kill its servers come last.

    A test that does not run in a mode is skipped here, before a fleet would start for it.
    """

    def order(item: pytest.Item) -> tuple[int, int, bool]:
        if not hasattr(item, "callspec"):  # it starts servers of its own
            return -1, 0, False
        parameters = item.callspec.params
        fleet = [*FLEETS].index(parameters["servers"])
        return [*MODES].index(parameters["mode"]), fleet, item.path.stem == "test_faults"

    items.sort(key=order)
    for item in items:
        modes = item.get_closest_marker("modes")
        if modes is not None and item.callspec.params["mode"] not in modes.args:
            item.add_marker(pytest.mark.skip(reason=modes.kwargs["reason"]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Saves what the agents know of a failure, while their servers still run, beside the servers' logs."""
    report = yield
    servers = getattr(item, "funcargs", {}).get("servers")
    if report.when == "call" and report.failed and servers is not None:
        saved_to = servers.socket_dir.with_name(f"{item.name.replace('[', '-').rstrip(']')}.kvrec")
        command = [sys.executable, "-m", "kvctl", "record", str(saved_to)]
        environment = {**os.environ, "KVCTL_SOCKET_DIR": str(servers.socket_dir)}
        try:
            saved = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            said = saved.stdout + saved.stderr
        except subprocess.TimeoutExpired as error:  # which would end the whole run
            said = str(error)
        report.sections.append(("kvctl record", said))
    return report


@pytest.fixture(scope="session", params=os.environ.get("SGLANG_MODES", " ".join(MODES)).split())
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def traces() -> Iterator[Receiver]:
    """Gets the spans of the servers of `TRACED`."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest,
    mode: str,
    python: Path,
    model: Path,
    qwen3: Path,
    deep: Path,
    folder: Path,
    undivided: Undivided,
    traces: Receiver,
) -> Iterator[Servers]:
    """The fleet that a test names as its parameter; it serves all tests that name it, one after another."""
    backend, plugin = MODES[mode]
    at = folder / f"{mode}-{request.param}"
    (at / "sockets").mkdir(parents=True)
    environment = {**ENVIRONMENT, "KVCTL_SGLANG": plugin, "KVCTL_SOCKET_DIR": str(at / "sockets")}
    if request.param == TRACED:
        environment |= {"KVCTL_OTEL_ENDPOINT": traces.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with_layers = request.param.startswith("layers")
    if with_layers:
        environment |= {"KVCTL_PIPELINE": "on", "KVCTL_PIPELINE_GROUP_SIZE": "3"}
    with_attention = "attention" in request.param
    if with_attention:
        # Its seven processes poll on few cores, where SGLang gives up a bootstrap server that answers late twice.
        # Nobody is killed here.
        environment["SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"] = "24"
    of_fleet = qwen3 if with_attention else deep if with_layers else model
    fleet = fleet_of(python, of_fleet, at, environment, "overlap" in request.param)
    prefills, decodes = FLEETS[request.param]
    running = Servers(
        mode,
        fleet,
        at / "sockets",
        {size: fleet.prefill(f"prefill-{size}", backend, *placed(PREFILLS[size], 0)) for size in prefills},
        {size: fleet.decode(f"decode-{size}", backend, *placed(DECODES[size], 1)) for size in decodes},
        fleet.router("router"),
        Undivided(fleet.server("alone")) if of_fleet is not model else None,
    )
    if venv := os.environ.get("SGLANG_DECODE_VENV"):  # of another release
        for decode in running.decodes.values():
            decode.command = [f"{Path(venv).absolute()}/bin/python", *decode.command[1:]]
    with fleet:
        yield running
    end_observer(running.socket_dir)
