"""Checks of the host, on simulated hosts."""

from __future__ import annotations

import os
import re
import resource
import shlex
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.endpoints import Discovery, Endpoint, listener_pid
from kvctl.client.faults import Fault, FaultCode, timed_out
from kvctl.client.fleet import Survey
from kvctl.health.finding import Severity
from kvctl.health.host import engines, system
from kvctl.health.host.inspection import explain_faults, inspect, version_fact
from kvctl.health.host.view import Fact, HostView, ImportProblem, LocalAgent
from kvctl_agent.contract import VERSION
from tests.kvctl.health.fleets import Fleet
from tests.support.host_tree import bonded_roce

INFINITE = resource.RLIM_INFINITY
# That a host with such a device, package or limit has, and what shells have of their own.
PROGRAMS = {"apt-get", "cat", "chmod", "echo", "ibstat", "modprobe", "mount", "namei", "pip", "ss", "sysctl", "ulimit"}
PROGRAMS |= {"unset"}
AGENTS = (LocalAgent("prefill-0", 10, 10), LocalAgent("decode-0", 11, 11))

Host = Callable[..., HostView]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Makes a host from files: `host({"/proc/…": "text"}, packages={…})`; no device, no engine, no limit."""

    def make(
        files: Mapping[str, str] | None = None, packages: Mapping[str, str] | None = None, **more: Any
    ) -> HostView:
        for path, text in {"/dev/shm/.keep": "", **(files or {})}.items():
            file = tmp_path / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        defaults: dict[str, Any] = {"environ": {}, "limit": lambda _: (INFINITE, INFINITE), "cores": lambda: 8}
        return HostView(tmp_path, packages=lambda: packages or {}, **{**defaults, **more})

    return make


def only(facts: Any, topic: str) -> Fact:
    (found,) = [fact for fact in facts if fact.topic == topic]
    for command in re.findall("`([^`]+)`", found.remedy):
        assert shlex.split(command)[0] in PROGRAMS, f"{found.remedy}: {command} is no command"
    return found


IB = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE", "/dev/infiniband/uverbs0": ""}


class TestDevices:
    def test_without_rdma_and_gpu_all_is_well(self, host: Host) -> None:
        found = list(engines.device_facts(host()))
        assert {fact.severity for fact in found} == {Severity.INFO}
        assert "shared memory on this host and TCP between hosts" in only(found, "RDMA").means

    @pytest.mark.parametrize(
        ("files", "found", "remedy"),
        [
            (IB, "active: mlx5_0:1", ""),
            ({**IB, "/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"}, "mlx5_0:1 down", "`ibstat`"),
            (dict(list(IB.items())[:1]), "no /dev/infiniband/uverbs*", "--device=/dev/infiniband"),
        ],
    )
    def test_rdma(self, files: dict[str, str], found: str, remedy: str, host: Host) -> None:
        fact = only(engines.device_facts(host(files)), "RDMA")
        assert found in fact.found
        assert (remedy in fact.remedy) is (fact.severity is Severity.WARNING or not remedy)

    def test_ports_have_their_speed_and_the_ones_that_are_down_are_named(self, tmp_path: Path) -> None:
        tree = bonded_roce(tmp_path)
        tree.pci("pci0000:60/0000:60:01.0/0000:61:00.0", 0, "mlx5_core")
        tree.rdma("mlx5_9", "pci0000:60/0000:60:01.0/0000:61:00.0")
        tree.set("mlx5_9", state="1: DOWN")
        (tmp_path / "dev/infiniband").mkdir(parents=True)
        (tmp_path / "dev/infiniband/uverbs0").touch()
        fact = only(engines.device_facts(HostView(tmp_path, environ={}, packages=dict)), "RDMA")
        assert fact.found == "active: mlx5_bond_0:1 (RoCE, 100 Gbit/s); not active: mlx5_9:1 down"

    def test_a_gpu_beside_rdma_wants_peermem(self, host: Host) -> None:
        driver = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu"}
        assert only(engines.device_facts(host(driver)), "GPU").found == "NVIDIA driver 570.86.10"
        fact = only(engines.device_facts(host({**driver, **IB})), "GPU")
        assert (fact.severity, fact.code) == (Severity.WARNING, "KV_REGISTER_FAILED")
        assert "modprobe nvidia_peermem" in fact.remedy
        loaded = host({**driver, **IB, "/sys/module/nvidia_peermem/refcnt": "0"})
        assert only(engines.device_facts(loaded), "GPU").severity is Severity.INFO

    def test_agents_that_do_not_see_each_others_gpus(self, host: Host) -> None:
        gpus = host({"/proc/driver/nvidia/version": "570.1"})
        told = {"a": {"CUDA_VISIBLE_DEVICES": "0"}, "b": {"CUDA_VISIBLE_DEVICES": "1"}}
        *_, fact = engines.device_facts(gpus, told)
        assert (fact.topic, fact.found) == ("GPU", "CUDA_VISIBLE_DEVICES differs: a 0, b 1")
        assert "show every agent all GPUs" in fact.remedy
        alike = {"a": {"CUDA_VISIBLE_DEVICES": "0,1"}, "b": {"CUDA_VISIBLE_DEVICES": "1,0"}, "c": {}}
        assert not any("VISIBLE" in fact.found for fact in engines.device_facts(gpus, alike))


class TestLimits:
    def test_locked_memory_matters_to_rdma_only(self, host: Host) -> None:
        few = {"limit": lambda _: (8 << 20, 8 << 20)}
        assert only(system.limit_facts(host(**few)), "locked memory").severity is Severity.INFO
        fact = only(system.limit_facts(host(IB, **few)), "locked memory")
        assert (fact.severity, fact.found) == (Severity.WARNING, "8 MiB (this shell)")
        assert "ulimit -l unlimited" in fact.remedy
        assert only(system.limit_facts(host(IB)), "locked memory").severity is Severity.INFO

    def test_limits_are_those_of_the_agents_where_they_can_be_seen(self, host: Host) -> None:
        def told(locked: str) -> str:
            return f"Limit    Soft Limit   Hard Limit   Units\nMax locked memory     {locked}     {locked}    bytes\n"

        files = {"/proc/10/limits": told("unlimited"), "/proc/11/limits": told("65536")}
        fact = only(system.limit_facts(host({**IB, **files}, agents=AGENTS)), "locked memory")
        assert fact.found == "64 KiB (decode-0)"
        same = {"/proc/10/limits": told("65536"), "/proc/11/limits": told("65536")}
        assert (
            only(system.limit_facts(host({**IB, **same}, agents=AGENTS)), "locked memory").found
            == "64 KiB (every agent)"
        )
        free = {"/proc/10/limits": told("unlimited"), "/proc/11/limits": told("unlimited")}
        assert only(system.limit_facts(host({**IB, **free}, agents=AGENTS)), "locked memory").found == (
            "unlimited (every agent)"
        )

    def test_few_descriptors(self, host: Host) -> None:
        fact = only(system.limit_facts(host(limit=lambda _: (256, 256))), "file descriptors")
        assert (fact.severity, fact.code) == (Severity.WARNING, "KV_FDS_LOW")

    @pytest.mark.parametrize(("used", "severity"), [(7, Severity.INFO), (8, Severity.WARNING)])
    def test_ephemeral_ports_are_counted_once_each(self, used: int, severity: Severity, host: Host) -> None:
        lines = [f"   {n}: 0100007F:{1000 + n:04X} 0100007F:1F90 01 " for n in range(used)]
        files = {
            "/proc/sys/net/ipv4/ip_local_port_range": "1000\t1009",
            "/proc/net/tcp": "\n".join(["header", *lines, *lines, "   9: 0100007F:0016 0:0 0A"]),
        }
        fact = only(system.limit_facts(host(files)), "ephemeral ports")
        assert fact.severity is severity
        assert fact.found.startswith(f"{used} of 10 in use")

    def test_shared_memory_that_is_missing(self, tmp_path: Path) -> None:
        bare = HostView(tmp_path, environ={}, limit=lambda _: (INFINITE, INFINITE), packages=dict, cores=lambda: 1)
        assert only(system.limit_facts(bare), "/dev/shm").severity is Severity.WARNING

    def test_agents_that_share_processors(self, host: Host) -> None:
        assert "take turns" in only(system.limit_facts(host(cores=lambda: 1, agents=AGENTS)), "processors").means
        assert "take turns" not in only(system.limit_facts(host(agents=AGENTS)), "processors").means


MOONCAKE = {"mooncake-transfer-engine-non-cuda": "0.3.13"}
LIBRARIES = {
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
    "/usr/lib64/libnuma.so.1": "",
    "/opt/own/libcurl.so.4": "",
    "/etc/ld.so.conf.d/arch.conf": "# here\n/usr/lib/x86_64-linux-gnu\n",
}
OWN = {"LD_LIBRARY_PATH": "/opt/own"}


class TestEngines:
    def said(self, host: HostView, **environments: Mapping[str, str]) -> list[Fact]:
        return list(engines.engine_facts(host, environments))

    def test_without_an_engine(self, host: Host) -> None:
        assert "loopback" in only(self.said(host()), "engines").means

    def test_mooncake_with_its_libraries(self, host: Host) -> None:
        found = self.said(host(LIBRARIES, MOONCAKE, environ=OWN))
        assert [fact for fact in found if fact.severity > Severity.INFO] == []

    def test_mooncake_without_them_names_the_packages(self, host: Host) -> None:
        fact = only(self.said(host(LIBRARIES, MOONCAKE)), "Mooncake")
        assert fact.remedy == "`apt-get install libcurl4`"

    def test_two_wheels_in_one_folder(self, host: Host) -> None:
        both = {**MOONCAKE, "mooncake-transfer-engine": "0.3.13"}
        assert "the last one installed wins" in only(self.said(host(LIBRARIES, both, environ=OWN)), "Mooncake").means

    def test_a_cuda_wheel_without_cuda(self, host: Host) -> None:
        fact = only(self.said(host(LIBRARIES, {"mooncake-transfer-engine": "0.3.13"}, environ=OWN)), "Mooncake")
        assert "no NVIDIA driver" in fact.found

    def test_a_wheel_without_cuda_beside_a_gpu(self, host: Host) -> None:
        files = {**LIBRARIES, "/proc/driver/nvidia/version": "570.1"}
        fact = only(self.said(host(files, MOONCAKE, environ=OWN)), "Mooncake")
        assert fact.severity is Severity.INFO  # whoever has pools in host memory is fine
        assert "pip install mooncake-transfer-engine-cuda13" in fact.remedy

    @pytest.mark.parametrize(
        ("environment", "severity", "words"),
        [
            ({}, Severity.INFO, "fastest lane that it finds"),
            ({"UCX_TLS": "all"}, Severity.INFO, "fastest lane that it finds"),
            ({"UCX_TLS": "^ib"}, Severity.INFO, "not excluded"),
            ({"UCX_TLS": "tcp,self"}, Severity.INFO, "also between processes of one host"),
            ({"UCX_TLS": "tcp,sm,self"}, Severity.INFO, "the fastest of these"),
            ({"UCX_TLS": "rc,sm,self"}, Severity.WARNING, "need an RDMA device"),
            ({"UCX_NET_DEVICES": "mlx5_0:1"}, Severity.WARNING, "no network device mlx5_0"),
            ({"UCX_NET_DEVICES": "eth0"}, Severity.INFO, "these devices only"),
            ({"UCX_NET_DEVICES": "all"}, Severity.INFO, "these devices only"),
        ],
    )
    def test_what_ucx_was_told(self, environment: dict[str, str], severity: Severity, words: str, host: Host) -> None:
        fact = only(self.said(host({"/sys/class/net/eth0/mtu": "1500"}), decode=environment), "UCX")
        assert fact.severity is severity
        assert words in fact.means

    def test_a_gpu_needs_a_cuda_lane(self, host: Host) -> None:
        files = {"/proc/driver/nvidia/version": "570.1"}
        assert "CUDA lane" in only(self.said(host(files), decode={"UCX_TLS": "tcp,sm,self"}), "UCX").means
        assert "through host memory" in only(self.said(host(files), decode={"UCX_TLS": "sm,cuda_copy"}), "UCX").means
        assert "the fastest" in only(self.said(host(files), decode={"UCX_TLS": "sm,cuda_copy,cuda_ipc"}), "UCX").means
        assert "the fastest" in only(self.said(host(files), decode={"UCX_TLS": "sm,cuda"}), "UCX").means

    def test_agents_that_were_told_the_same_share_a_line(self, host: Host) -> None:
        told = {name: {"UCX_TLS": "tcp,self"} for name in ("a", "b", "c")}
        assert only(self.said(host(), **told), "UCX").found == "UCX_TLS=tcp,self (a and 2 others)"

    def test_what_ends_mooncake(self, host: Host) -> None:
        found = self.said(host(environ={"MC_LOG_DIR": "/tmp", "MC_TCP_PROTO": "1"}))
        assert [fact.remedy for fact in found if fact.topic == "Mooncake"] == [
            "`unset MC_LOG_DIR`",
            "`unset MC_TCP_PROTO`",
        ]


class TestThreads:
    def said(self, cores: int, *writers: tuple[str, int, int], native: bool = True) -> list[Fact]:
        return list(engines.thread_facts(cores, [engines.NixlWriter(*writer, native) for writer in writers]))

    def test_a_rank_without_native_posts_needs_no_threads_on_few_cores(self) -> None:
        (fact,) = self.said(2, ("a", 0, 1), native=False)
        assert fact.severity is Severity.INFO

    def test_without_nixl_there_is_nothing_to_say(self) -> None:
        assert self.said(64) == []

    @pytest.mark.parametrize(
        ("cores", "writers", "severity", "found", "remedy"),
        [
            (64, [("a", 8, 4), ("b", 8, 4)], Severity.INFO, "16 in 2 agents, 64 cores", ""),
            (2, [("a", 0, 2)], Severity.INFO, "0 in 1 agent, 2 cores", ""),
            (2, [("a", 0, 1)], Severity.WARNING, "none in a", "automatic: 2"),
            (64, [("a", 0, 4), ("b", 8, 4)], Severity.WARNING, "none in a", "automatic: 8"),
            (32, [("a", 0, 8), ("b", 0, 8), ("c", 0, 8)], Severity.WARNING, "none in a and 2 others", "automatic: 4"),
            (8, [("a", 8, 1), ("b", 8, 1)], Severity.INFO, "16 in 2 agents, 8 cores", ""),
            (8, [(name, 8, 1) for name in "abc"], Severity.WARNING, "24 in 3 agents, 8 cores", "lower it"),
        ],
    )
    def test_a_number_that_does_not_suit_the_host(
        self, cores: int, writers: list[tuple[str, int, int]], severity: Severity, found: str, remedy: str
    ) -> None:
        (fact,) = self.said(cores, *writers)
        assert (fact.topic, fact.severity) == ("NIXL threads", severity)
        assert found in fact.found
        assert remedy in fact.remedy
        assert bool(fact.remedy) is (severity is Severity.WARNING)


class TestSurroundings:
    def said(self, host: HostView, directory: Path, **ports: int) -> list[Fact]:
        return list(system.environment_facts(host, directory, ports))

    @pytest.mark.parametrize(
        ("agents", "severity", "words"),
        [
            ((), Severity.INFO, "workers of one host need one"),
            (AGENTS, Severity.INFO, "they can share memory"),
            ((AGENTS[0], LocalAgent("decode-0", None, 7)), Severity.WARNING, "neither copy"),
            ((LocalAgent("decode-0", 400, 7),), Severity.INFO, "transfers are unaffected"),
        ],
    )
    def test_pid_namespaces(
        self, agents: tuple[LocalAgent, ...], severity: Severity, words: str, host: Host, tmp_path: Path
    ) -> None:
        fact = only(self.said(host(agents=agents), tmp_path), "PID namespace")
        assert fact.severity is severity
        assert words in fact.means

    @pytest.mark.parametrize(("scope", "told"), [("0", False), ("1", False), ("2", True), ("3", True)])
    def test_ptrace(self, scope: str, told: bool, host: Host, tmp_path: Path) -> None:
        found = self.said(host({"/proc/sys/kernel/yama/ptrace_scope": scope}), tmp_path)
        assert any(fact.topic == "ptrace" for fact in found) is told

    def test_huge_pages(self, host: Host, tmp_path: Path) -> None:
        found = self.said(host({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}), tmp_path)
        assert only(found, "huge pages").remedy

    def test_the_socket_directory(self, host: Host, tmp_path: Path) -> None:
        directory = tmp_path / "run"
        assert "does not exist" in only(self.said(host(), directory), "socket directory").found
        directory.mkdir(mode=0o700)
        assert only(self.said(host(), directory), "socket directory").severity is Severity.INFO
        directory.chmod(0o777)
        assert only(self.said(host(), directory), "socket directory").remedy == f"`chmod 700 {directory}`"
        deep = tmp_path / ("d" * 90)
        deep.mkdir(mode=0o700)
        assert only(self.said(host(), deep), "socket directory").remedy == "set KVCTL_SOCKET_DIR to a shorter path"

    def test_a_port_that_somebody_else_holds(self, host: Host, tmp_path: Path) -> None:
        line = "   0: 00000000:24B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1"
        files = {"/proc/net/tcp": f"header\n{line}\n", "/proc/99/cmdline": "nginx\0-g\0daemon off;\0"}
        made = host(files, agents=AGENTS)
        for pid in (99, 11):
            (tmp_path / f"proc/{pid}/fd").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/99/fd/5").symlink_to("socket:[4711]")
        fact = only(self.said(made, tmp_path, KVCTL_METRICS_ENDPOINT=9400), "ports")
        assert fact.found == "KVCTL_METRICS_ENDPOINT: port 9400 is held by process 99 (nginx -g daemon off;)"
        (tmp_path / "proc/99/fd/5").unlink()
        (tmp_path / "proc/11/fd/5").symlink_to("socket:[4711]")
        assert [each for each in self.said(made, tmp_path, KVCTL_METRICS_ENDPOINT=9400) if each.topic == "ports"] == []


@pytest.mark.parametrize(
    ("agents", "severity", "words"),
    [
        ({}, Severity.INFO, f"kvctl {VERSION}"),
        ({"a": VERSION}, Severity.INFO, f"kvctl {VERSION}, as the agent"),
        ({"a": VERSION, "b": VERSION}, Severity.INFO, "as all 2 agents"),
        ({"a": "9.0", "b": "9.0"}, Severity.INFO, "a 9.0, b 9.0"),
        ({"a": VERSION, "b": "9.0"}, Severity.WARNING, "b 9.0"),
    ],
)
def test_versions(agents: dict[str, str], severity: Severity, words: str) -> None:
    fact = version_fact(agents)
    assert fact.severity is severity
    assert words in fact.found


@pytest.mark.parametrize(("mode", "words"), [("observe", "only reads"), ("backend", "kvctl's agent transfers")])
def test_which_ranks_have_the_plugin_of_sglang(host: Host, tmp_path: Path, mode: str, words: str) -> None:
    fleet = Fleet()
    for name in fleet.answers:
        fleet.answers[name]["status"]["integration"] = {"engine": "sglang", "engine_version": "0.5.23", "mode": mode}
    fact = only(inspect(host(packages={"sglang": "0.5.23"}), tmp_path, fleet.snapshot()), "SGLang")
    assert fact.severity is Severity.INFO
    assert f"0.5.23, plugin of kvctl 0.1.0 loaded in mode {mode} by decode-0, " in fact.found
    assert words in fact.means


def test_an_installed_sglang_without_a_plugin(host: Host, tmp_path: Path) -> None:
    found = inspect(host(packages={"sglang": "0.5.23"}, sglang_problem=lambda python, environ: None), tmp_path)
    fact = only(found, "SGLang")
    assert fact.found == "0.5.23 installed, none of its ranks seen"
    assert "KVCTL_SGLANG=observe" in fact.remedy
    cause = "SGLang 0.5.23 cannot be imported: ModuleNotFoundError: No module named 'torchvision'"
    found = inspect(
        host(packages={"sglang": "0.5.23"}, sglang_problem=lambda python, environ: ImportProblem(cause)), tmp_path
    )
    assert (only(found, "SGLang").means, only(found, "SGLang").severity) == (cause, Severity.WARNING)
    assert not [fact for fact in inspect(host(), tmp_path) if fact.topic == "SGLang"]


def test_what_has_to_be_done_comes_first(host: Host, tmp_path: Path) -> None:
    made = host(environ={"MC_LOG_DIR": "/tmp", "KVCTL_METRICS_ENDPOINT": "127.0.0.1:x"}, limit=lambda _: (256, 256))
    found = inspect(made, tmp_path)
    marks = [fact.severity > Severity.INFO for fact in found]
    assert marks == sorted(marks, reverse=True)
    assert {fact.topic for fact in found if fact.severity > Severity.INFO} == {"file descriptors", "Mooncake"}


def test_this_very_host_can_be_looked_at(tmp_path: Path) -> None:
    found = inspect(HostView(), tmp_path)
    assert {"RDMA", "GPU", "locked memory", "engines", "versions"} <= {fact.topic for fact in found}
    assert all(fact.means and fact.found for fact in found)


class TestSilence:
    @pytest.fixture
    def hung(self, tmp_path: Path) -> Any:
        path = tmp_path / "hung.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            listener.listen()
            endpoint = Endpoint("hung", path)
            yield Survey(Discovery(tmp_path, live=[endpoint]), faults=[timed_out("hung", 2 * 10**9, local=True)])

    def test_the_process_behind_a_socket(self, hung: Survey, tmp_path: Path) -> None:
        assert listener_pid(tmp_path / "hung.sock") == os.getpid()
        assert listener_pid(tmp_path / "none.sock") is None
        assert listener_pid(tmp_path / ("x" * 108)) is None

    @pytest.mark.parametrize(
        ("state", "served_by", "words", "remedy"),
        [
            ("T", "an observer", "observer of this host's agents, process {pid} is stopped", "`kill -CONT {pid}`"),
            ("T", "the agent", "no answer within 2 s: its process {pid} is stopped", "`kill -CONT {pid}`"),
            ("D", "the agent", "its process {pid} waits in the kernel and cannot be", "`cat /proc/{pid}/stack`"),
            ("S", "the agent", "no answer within 2 s: its process {pid} is busy or hung", "`py-spy dump --pid {pid}`"),
            ("", "an observer", "no answer within 2 s: busy or hung", "`kvctl agents --timeout 10s`"),
        ],
    )
    def test_the_process_that_listens_tells_why_an_agent_does_not_answer(
        self, state: str, served_by: str, words: str, remedy: str, hung: Survey, host: Host, tmp_path: Path
    ) -> None:
        pid = os.getpid()
        line = f"{pid} (a) b) {state} 1 1 1 0 -1 0 0 0 0 0 100 50 0"
        view = host({f"/proc/{pid}/stat": line} if state else {})
        with (tmp_path / "hung.lock").open("w+") as lock:
            lock.write(f"{pid if served_by == 'the agent' else 1}\n")
            lock.flush()
            (finding,) = explain_faults(hung, view)
        assert (finding.severity, finding.code) == (Severity.CRITICAL, "timeout")
        assert words.format(pid=pid) in finding.cause
        assert finding.remedy.startswith(remedy.format(pid=pid))

    def test_a_file_knows_no_processes(self, hung: Survey) -> None:
        (finding,) = explain_faults(hung, None)
        assert finding.cause == "no answer within 2 s: busy or hung"
        assert finding.remedy.startswith("`kvctl agents --timeout 10s` waits longer")
        unknown = "no agent of this name among the 3 that answered; did you mean decode-0?"
        hung.faults[:] = [Fault("decode-9", FaultCode.UNREACHABLE, unknown)]
        (finding,) = explain_faults(hung, None)
        assert (finding.cause, finding.remedy) == (unknown, "`kvctl agents` shows which agents answer")
