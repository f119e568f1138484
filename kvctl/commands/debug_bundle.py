"""Writes a debug bundle: a recording of the fleet, and the output of the reading commands on that recording.

The commands run on the recording in the bundle, so their output is what `--from` shows later, and a redacted recording
yields redacted output.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
import orjson

from kvctl.client.bundles import RECORDING, Archive, Entry
from kvctl.client.faults import Fault
from kvctl.client.fleet import Fleet
from kvctl.client.recorder import SnapshotRecorder, write_snapshots
from kvctl.client.recordings import RecordedSnapshot, load, utf8
from kvctl.client.redaction import Redaction, redacted
from kvctl.commands.registry import load as command_named
from kvctl.exit_codes import ExitCode
from kvctl.health.host.view import HostView

HOST = "host.json"
_APART_NS = 1_000_000_000
_WIDTH = "160"


@dataclass(frozen=True, slots=True)
class Text:
    """Text file of a bundle: its name, the command whose output it contains, and a description."""

    name: str
    args: tuple[str, ...]
    what: str


TEXTS = (
    Text("status.txt", ("status", "-o", "wide"), "the fleet on one screen"),
    Text("health.txt", ("health",), "what is wrong, the worst first"),
    Text("findings.txt", ("health", "detail"), "evidence, cause and remedy of each"),
    Text("doctor.txt", ("doctor",), "what to do about it, step by step"),
    Text("health.json", ("health", "detail", "-o", "json"), "the same for programs"),
    Text("agents.txt", ("agents", "-o", "wide"), "who was there"),
    Text("rooms.txt", ("rooms", "-o", "wide"), "active rooms"),
    Text("history.txt", ("rooms", "history", "-n", "1000", "-o", "wide"), "rooms that finished last"),
    Text("failed.txt", ("rooms", "failed", "-n", "1000", "-o", "wide"), "rooms that failed, with their first causes"),
    Text("slow.txt", ("rooms", "slow", "-n", "1000", "-o", "wide"), "slowest finished rooms"),
    Text("staging.txt", ("staging", "-o", "wide"), "rings and buffers"),
    Text("staging-map.txt", ("staging", "map", "-o", "wide"), "a picture of each ring"),
    Text("layers.txt", ("layers", "-o", "wide"), "where the time goes"),
    Text("peers.txt", ("peers", "-o", "wide"), "connections between agents"),
    Text("events.txt", ("events", "-n", "4096", "-o", "wide"), "the flight recorders, merged"),
    Text("config.txt", ("config", "show", "-o", "wide"), "configuration and its origin"),
    Text("metrics.prom", ("metrics", "-o", "prom"), "metrics in Prometheus' text format"),
    Text("stacks.txt", ("stacks", "-o", "wide"), "what every thread was doing"),
)

HOST_TEXT = Text("host.txt", ("doctor", "--host-only"), "what this machine means for transfers")


@dataclass(slots=True)
class BundleResult:
    """Contents of a written bundle, and the data missing from it.

    Attributes:
        entries: files in the bundle.
        agents: number of agents that answered.
        faults: agents that answered no query or not all of them.
        left_out: descriptions of omitted data.
        failed: files that could not be created, with the reason.
        partial: whether Ctrl-C ended the writing early.
    """

    entries: list[Entry] = field(default_factory=list)
    agents: int = 0
    faults: list[Fault] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    partial: bool = False


def write_bundle(
    file: IO[bytes], directory: Path, source: Fleet | Path, redact: bool, report: Callable[[str], None]
) -> BundleResult:
    """Writes a bundle to `file`, which must be empty.

    Args:
        directory: directory for a temporary copy of the recording.
        source: the fleet to record, or a recording or bundle whose snapshots are used.
        redact: whether to replace names, addresses, paths and keys.
        report: called with the name of each step.
    """
    return _Bundle(file, directory, source, redact, report).write()


class _Bundle:
    """Writer of one bundle; collects the result while it adds files."""

    def __init__(
        self, file: IO[bytes], directory: Path, source: Fleet | Path, redact: bool, report: Callable[[str], None]
    ) -> None:
        self._archive = Archive(file)
        self._directory = directory
        self._source = source
        self._redaction = Redaction.of_this_machine() if redact else None
        self._report = report
        self._result = BundleResult()

    def write(self) -> BundleResult:
        result = self._result
        about: dict[str, Any] = {"made_at_ns": time.time_ns(), "redacted": self._redaction is not None}
        try:
            self._add_files()
        except KeyboardInterrupt:
            result.partial = True
        faults = [
            {"agent": utf8(fault.agent), "code": fault.code, "message": utf8(fault.message)} for fault in result.faults
        ]
        about |= {
            "partial": result.partial,
            "agents": result.agents,
            "failed": [self._redact(text) for text in result.failed],
            "left_out": [self._redact(text) for text in result.left_out],
            "errors": self._redaction.document(faults) if self._redaction else faults,
        }
        try:
            self._archive.end(about)
        except KeyboardInterrupt:  # after the last file was written
            result.partial = True
        result.entries = self._archive.entries
        return result

    def _add_files(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=".kvctl-", suffix=".kvrec") as recording:
            self._report("asking the agents")
            snapshots = self._snapshots()
            if self._redaction is not None:
                snapshots = redacted(snapshots, self._redaction)
            self._result.partial = not write_snapshots(recording, snapshots)
            recording.flush()
            self._archive.add(RECORDING, recording, "snapshots of the fleet, for --from")
            if self._result.partial:
                return
            # Without agents no command has anything to show.
            for text in TEXTS if self._result.agents else ():
                self._add_text(text, "--from", recording.name)
        if not isinstance(self._source, Path):
            self._add_text(HOST_TEXT)
            self._report(HOST)
            facts = host_facts()
            known = self._redaction.document(facts) if self._redaction else facts
            self._archive.add(HOST, orjson.dumps(known, option=orjson.OPT_INDENT_2), "the same machine in numbers")

    def _snapshots(self) -> Iterator[RecordedSnapshot]:
        """Yields the snapshots of the source, and sets agents, faults and omissions in the result."""
        result = self._result
        for snapshot in load(self._source) if isinstance(self._source, Path) else _taken(self._source):
            result.agents = max(result.agents, len(snapshot.agents) - len(snapshot.silent))
            result.faults = [*snapshot.faults, *snapshot.silent]
            result.left_out = list(snapshot.left_out)  # later snapshots add what the first ones lack
            yield snapshot

    def _add_text(self, text: Text, *options: str) -> None:
        self._report(text.name)
        if output := self._output_of(text, options):
            self._archive.add(text.name, self._redact(output).encode(), text.what)

    def _output_of(self, text: Text, options: tuple[str, ...]) -> str:
        """Runs the command in this process and returns its stdout; if it prints none, the result records the error."""
        command = command_named(text.args[0])
        assert command is not None, text.name
        out, err = io.StringIO(), io.StringIO()
        layout = [] if "-o" in text.args else ["-o", "wide"]
        args = [*text.args[1:], *layout, *options, "--color", "never", "-q"]
        code: Any = ExitCode.OK
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _fixed_width():
            try:
                code = command.main(args, prog_name=f"kvctl {text.args[0]}", standalone_mode=False)
            except click.Abort:  # click's exception for Ctrl-C
                raise KeyboardInterrupt from None
            except Exception as error:  # an error of one command costs only its own file
                err.write(f"{type(error).__name__}: {error}")
                code = ExitCode.FAILED
        if not out.getvalue() and code not in {ExitCode.OK, None}:
            self._result.failed.append(f"{text.name}: {err.getvalue().strip() or f'exit code {code}'}")
        return out.getvalue()

    def _redact(self, text: str) -> str:
        return utf8(self._redaction.text(text) if self._redaction else text)


def _taken(fleet: Fleet) -> Iterator[RecordedSnapshot]:
    recorder = SnapshotRecorder(fleet)
    yield recorder.take()
    time.sleep(_APART_NS / 1e9)
    yield recorder.take()


@contextlib.contextmanager
def _fixed_width() -> Iterator[None]:
    """Sets COLUMNS for the time of the context, so that the output does not depend on the terminal's width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


_PACKAGES = ("nixl", "mooncake-transfer-engine", "torch", "numpy", "pyzmq", "orjson", "msgspec", "triton")
_ENVIRONMENT = ("KVCTL_", "UCX_", "NIXL_", "MC_", "SGLANG_DISAGG", "CUDA_VISIBLE", "NCCL_")
_MEMORY = {"total_bytes": "MemTotal", "available_bytes": "MemAvailable"}
_LIMITS = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
    "core_bytes": resource.RLIMIT_CORE,
}


def host_facts() -> dict[str, Any]:
    """Returns facts about this machine as JSON values; unknown facts are None or missing."""
    host, system = HostView(), platform.uname()
    memory = dict(line.split(":", 1) for line in (host.text("/proc/meminfo") or "").splitlines() if ":" in line)
    packages = host.packages()
    try:
        shared_memory = shutil.disk_usage("/dev/shm").free
    except OSError:
        shared_memory = None
    return {
        "at_ns": time.time_ns(),
        "host": system.node,
        "system": f"{system.system} {system.release} {system.machine}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": {name: int(memory[key].split()[0]) * 1024 for name, key in _MEMORY.items() if key in memory} or None,
        "shared_memory_free_bytes": shared_memory,
        "limits": {  # soft and hard; None means unlimited
            name: [None if value == resource.RLIM_INFINITY else value for value in host.limit(number)]
            for name, number in _LIMITS.items()
        },
        "infiniband": host.names("/sys/class/infiniband"),
        "nvidia": host.names("/proc/driver/nvidia/gpus"),
        "packages": {name: packages[name] for name in _PACKAGES if name in packages},
        "environment": {
            name: utf8(value) for name, value in sorted(host.environ.items()) if name.startswith(_ENVIRONMENT)
        },
    }
