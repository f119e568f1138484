"""Makes a debug bundle: what was captured, and what the reading commands make of it, in files that people can read.

The texts are the commands' own, run on the recording that is in the bundle: they show what `--from` would show, and
where names were taken out of the recording there are none in them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import click
import orjson

from kvctl.client.bundles import RECORDING, Archive, Entry
from kvctl.client.faults import Fault
from kvctl.client.fleet import Fleet
from kvctl.client.recorder import Saving, Series, SnapshotRecorder, write_moments, write_recording
from kvctl.client.recordings import Moment, load, utf8
from kvctl.client.redaction import Redaction, redacted
from kvctl.commands.registry import load as command_named
from kvctl.exit_codes import ExitCode

HOST = "host.json"
_APART_NS = 1_000_000_000
_WIDTH = "160"


@dataclass(frozen=True, slots=True)
class Text:
    """A file made by a command: its arguments, and what it shows."""

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
    """What came of it.

    Attributes:
        agents: how many answered.
        faults: of agents that did not, or not all.
        failed: files that could not be made, and why.
        entries: the files in it.
        partial: Ctrl-C ended it early.
    """

    entries: list[Entry] = field(default_factory=list)
    agents: int = 0
    faults: list[Fault] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    partial: bool = False


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """What goes into the bundle.

    Attributes:
        fleet: whom to ask; None where `source` is given.
        source: a recording or bundle whose moments are taken over.
        say: told what is done next.
    """

    fleet: Fleet | None
    source: Path | None
    redact: bool
    say: Callable[[str], None]


def write_bundle(file: IO[bytes], directory: Path, wish: BundleRequest) -> BundleResult:
    """A whole bundle, into an empty file; `directory` takes the recording while it is being made."""
    made = BundleResult()
    archive = Archive(file)
    redaction = Redaction.of_this_machine() if wish.redact else None
    about: dict[str, Any] = {"made_at_ns": time.time_ns(), "redacted": wish.redact}
    try:
        _fill(archive, directory, wish, redaction, made)
    except KeyboardInterrupt:
        made.partial = True
    failed = [utf8(redaction.text(text) if redaction else text) for text in made.failed]
    left_out = [utf8(redaction.text(text) if redaction else text) for text in made.left_out]
    faults = [{"agent": utf8(fault.agent), "code": fault.code, "message": utf8(fault.message)} for fault in made.faults]
    about |= {
        "partial": made.partial,
        "agents": made.agents,
        "failed": failed,
        "left_out": left_out,
        "errors": redaction.document(faults) if redaction else faults,
    }
    try:
        archive.end(about)
    except KeyboardInterrupt:  # it came late: all is in the file
        made.partial = True
    made.entries = archive.entries
    return made


def _fill(
    archive: Archive, directory: Path, wish: BundleRequest, redaction: Redaction | None, made: BundleResult
) -> None:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvctl-", suffix=".kvrec") as recording:
        wish.say("asking the agents")
        what = _record(recording, wish, redaction, made)
        recording.flush()
        archive.add(RECORDING, recording, what)
        if made.partial:
            return
        # Of a fleet that did not answer no command has anything to show.
        for text in TEXTS if made.agents else ():
            _add_text(archive, text, ("--from", recording.name), wish, redaction, made)
    if wish.source is None:
        _add_text(archive, HOST_TEXT, (), wish, redaction, made)
        wish.say(HOST)
        found = facts()
        known = redaction.document(found) if redaction else found
        archive.add(HOST, orjson.dumps(known, option=orjson.OPT_INDENT_2), "the same machine in numbers")


def _add_text(
    archive: Archive,
    text: Text,
    where: tuple[str, ...],
    wish: BundleRequest,
    redaction: Redaction | None,
    made: BundleResult,
) -> None:
    wish.say(text.name)
    shown = _shown(text, where, made)
    if shown:
        archive.add(text.name, utf8(redaction.text(shown) if redaction else shown).encode(), text.what)


def _record(file: IO[bytes], wish: BundleRequest, redaction: Redaction | None, made: BundleResult) -> str:
    """Writes the recording; returns what it holds."""
    if wish.fleet is not None and redaction is None:
        saving = Saving(wish.fleet.survey())
        write_recording(file, wish.fleet, saving, Series(_APART_NS, _APART_NS, lambda *_: None))
        made.agents, made.faults = len(saving.saved), saving.faults
        made.left_out += saving.left_out
        made.partial = saving.interrupted
        return "moments of the fleet, for --from, and what its machines were told, for kvctl replay"
    moments: Iterable[Moment] = _taken(wish.fleet) if wish.fleet is not None else _loaded(wish.source)
    counted = _counted(moments, made)
    made.partial = not write_moments(file, counted if redaction is None else redacted(counted, redaction))
    made.left_out.append("what the machines were told: it holds addresses" if redaction else "machine inputs")
    return "moments of the fleet, for --from"


def _taken(fleet: Fleet) -> Iterator[Moment]:
    taker = SnapshotRecorder(fleet)
    yield taker.take()
    time.sleep(_APART_NS / 1e9)
    yield taker.take()


def _loaded(source: Path | None) -> Iterator[Moment]:
    assert source is not None
    moments = load(source)
    return (moments[index] for index in range(len(moments)))


def _counted(moments: Iterable[Moment], made: BundleResult) -> Iterator[Moment]:
    for moment in moments:
        made.agents = max(made.agents, len(moment.agents) - len(moment.silent))
        made.faults = [*moment.faults, *moment.silent]
        made.left_out = list(moment.left_out)  # a series makes up for what its first moments lack
        yield moment


def _shown(text: Text, where: tuple[str, ...], made: BundleResult) -> str:
    """What the command prints of the recording that `where` names."""
    command = command_named(text.args[0])
    assert command is not None, text.name
    out, err = io.StringIO(), io.StringIO()
    human = [] if "-o" in text.args else ["-o", "wide"]
    args = [*text.args[1:], *human, *where, "--color", "never", "-q"]
    code: Any = ExitCode.OK
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _columns():
        try:
            code = command.main(args, prog_name=f"kvctl {text.args[0]}", standalone_mode=False)
        except click.Abort:  # is what Ctrl-C becomes inside a command
            raise KeyboardInterrupt from None
        except Exception as error:  # one command's mistake must not cost the others' answers
            err.write(f"{type(error).__name__}: {error}")
            code = ExitCode.FAILED
    if not out.getvalue() and code not in {ExitCode.OK, None}:
        made.failed.append(f"{text.name}: {err.getvalue().strip() or f'exit code {code}'}")
    return out.getvalue()


@contextlib.contextmanager
def _columns() -> Iterator[None]:
    """The width of pictures is the terminal's; a bundle looks the same whoever makes it."""
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
_LIMITS = {
    "memlock_bytes": resource.RLIMIT_MEMLOCK,
    "open_files": resource.RLIMIT_NOFILE,
    "core_bytes": resource.RLIMIT_CORE,
}


def facts() -> dict[str, Any]:
    """JSON-ready; a fact that cannot be had is None."""
    system = platform.uname()
    return {
        "at_ns": time.time_ns(),
        "host": system.node,
        "system": f"{system.system} {system.release} {system.machine}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": _meminfo(),
        "shared_memory_free_bytes": _free("/dev/shm"),
        "limits": {name: _limit(which) for name, which in _LIMITS.items()},
        "infiniband": _names("/sys/class/infiniband"),
        "nvidia": _names("/proc/driver/nvidia/gpus"),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "environment": {
            name: utf8(value) for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)
        },
    }


def _meminfo() -> dict[str, int] | None:
    wanted = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    pairs = (line.split(":", 1) for line in lines)
    return {wanted[name]: int(rest.split()[0]) * 1024 for name, rest in pairs if name in wanted}


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _limit(which: int) -> list[int | None]:
    """Soft and hard; None is no limit."""
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]


def _names(directory: str) -> list[str]:
    try:
        return sorted(each.name for each in Path(directory).iterdir())
    except OSError:
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
