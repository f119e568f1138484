"""`kvctl bench` as a process: real ranks, real transports, signals and failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from docs.json_schema import document_conflicts
from tests.support.polling import until

TINY = ["--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--tokens", "40", "--rooms", "6"]
# Minutes of simulated compute, so that there is time to interfere.
LONG = ["--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--tokens", "64", "--path", "staged"]
LONG += ["--rooms", "1000", "--layer-ms", "100"]
LOOPBACK = ["--transport", "loopback"]
TWO_TO_TWO = ["--prefill-tp", "2", "--decode-dp", "2"]
FOUR_TO_TWO = ["--prefill-tp", "4", "--decode-dp", "2"]

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(socket_dir: Path, socket_directory: Path) -> Iterator[Run]:
    """Starts `kvctl bench` with a temporary directory of its own; what it leaves there or runs fails the test."""
    started: list[subprocess.Popen[str]] = []
    temporary = socket_dir / "t"  # the shortest private path at hand
    temporary.mkdir()

    def start(*options: str) -> subprocess.Popen[str]:
        bench = subprocess.Popen(
            [sys.executable, "-m", "kvctl", "bench", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary), "NO_COLOR": "1"},
        )
        started.append(bench)
        return bench

    yield start
    for bench in started:
        bench.kill()
        bench.communicate()
    assert ranks_of(socket_directory) == []
    assert [*temporary.iterdir(), *socket_directory.iterdir()] == []


def finish(bench: subprocess.Popen[str], timeout_s: float = 250) -> tuple[int, str, str]:
    out, err = bench.communicate(timeout=timeout_s)
    return bench.returncode, out, err


def ranks_of(directory: Path) -> list[int]:
    """Rig processes that use this socket directory: those that any bench of this test has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"kvctl.lab.ranks" in words and f"KVCTL_SOCKET_DIR={directory}".encode() in (
                (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


def pid_of(directory: Path, name: str) -> int:
    """The process of a rank, once it holds its name and moves rooms."""
    return int((directory / f"{name}.lock").read_text())


def running(bench: subprocess.Popen[str]) -> None:
    """Waits until rooms move: `-v` says so on stderr."""
    assert bench.stderr is not None
    seen = []
    for line in bench.stderr:
        seen.append(line)
        if "kvctl: staged, batch 1" in line:
            assert seen[0].startswith("kvctl: starting ")
            assert seen[1].startswith("kvctl: measuring the memcpy roofline (0 of ")
            time.sleep(0.3)
            return
    raise AssertionError("".join(seen))


def after(bench: subprocess.Popen[str], step: str) -> None:
    """Waits until a step is over: until the next one begins."""
    assert bench.stderr is not None
    seen = []
    for line in bench.stderr:
        seen.append(line)
        if len(seen) > 1 and step in seen[-2]:
            return
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("transport", ["loopback", pytest.param("nixl", marks=pytest.mark.sample)])
def test_every_path_of_unequal_layouts_verifies(spawn: Run, transport: str, tmp_path: Path):
    saved = tmp_path / "result.json"
    bench = spawn(*FOUR_TO_TWO, *TINY, "--transport", transport, "--save", str(saved), "-o", "tsv")
    code, out, err = finish(bench)
    assert (code, err) == (0, "")
    document = orjson.loads(saved.read_bytes())
    assert document["verified"] is True
    assert [run["path"] for run in document["runs"]] == ["slice", "staged", "auto"]
    assert {(run["rooms"], run["failed"], run["verified"]) for run in document["runs"]} == {(6, 0, True)}
    assert [run["writes_per_room"] for run in document["runs"]] == [4, 4, 4]
    assert document["runs"][0]["descriptors_per_room"] == 4 * 2 * 2 * 48  # writers, layers, K and V, whole-page tokens
    assert all(run["latency_ms"]["p50"] > 0 and run["gb_per_s"] > 0 for run in document["runs"])
    assert document["floors"]["memcpy_gb_per_s"] > 0
    assert document["floors"]["transport_write_gb_per_s"] > 0
    assert document["env"]["nixl"]
    header, *lines = out.splitlines()
    assert header.split("\t")[0] == "path"
    assert [line.split("\t")[0] for line in lines] == ["slice", "staged", "auto"]


@pytest.mark.parametrize(
    "options",
    [
        # Layouts are the matrix's; here they are a bench's, with options that change what is verified.
        ["--decode-tp", "4", "--path", "staged,slice", "--dtype", "fp8", "--head-dim", "20", "--page-size", "3"],
        ["--prefill-dp", "2", "--decode-dp", "2", "--path", "bulk,staged", "--chunk-tokens", "32"],
        ["--decode-dp", "2", "--prefix-hit", "0.5", "--tokens", "16..200", "--concurrency", "5"],
        ["--sweep", "concurrency=1,3", "--sweep", "tokens=16,50", "--path", "auto", "--repeat", "2"],
        ["--verify", "sample", "--ring-mb", "1", "--page-order", "contiguous"],
        ["--prefill-instances", "tp2,pp1+1,cp2", "--path", "staged"],
    ],
    ids=" ".join,
)
def test_layouts_and_loads_verify(spawn: Run, options: list[str]):
    code, out, err = finish(spawn(*LOOPBACK, *TINY, *options, "-o", "json"))
    assert (code, err) == (0, "")
    printed = orjson.loads(out)
    assert document_conflicts(printed) == []
    runs = printed["data"]
    assert runs
    assert all(run["verified"] and run["verified_parts"] > 0 for run in runs)


@pytest.mark.parametrize(
    ("options", "path", "descriptors"),
    [
        ("--kv-layout hnd,fused", "slice", 3 * 2 * 2 * 16 * 4),
        ("--prefill-page-size 16 --decode-page-size 64", "bulk", 3 * 2 * 2),
        ("--prefill-page-size 64 --decode-page-size 16", "bulk", 3 * 2 * 2),
        ("--prefill-tp 4 --decode-cp 2", "slice", 4 * 40 * 2 * 2),
        ("--prefill-cp 2 --cp-mode all --decode-cp 4 --cp-interleave 4", "bulk", 10 * 2 * 2),
        # Tokens 16 to 40 in 3 pages.
        ("--kv-group swa:layers=3,page=8,window=20 --pipeline off,1", "bulk", 3 * 2 * 2 + 3 * 2 * 3),
    ],
)
def test_unlike_pages_pools_decode_cp_and_groups_verify(
    spawn: Run, kvctl: Any, options: str, path: str, descriptors: int, tmp_path: Path
) -> None:
    saved = tmp_path / "result.json"
    code, _, err = finish(spawn(*options.split(), *TINY, "--save", str(saved), "-o", "tsv"))
    assert (code, err) == (0, "")
    runs = orjson.loads(saved.read_bytes())["runs"]
    assert list(dict.fromkeys(run["path"] for run in runs)) == [path, "staged", "auto"]
    assert {(run["failed"], run["verified"]) for run in runs} == {(0, True)}
    shares = orjson.loads(kvctl("bench", *options.split(), *TINY, "--plan", "-o", "json").out)["data"]
    assert sum(share["descriptors"][path] for share in shares) == descriptors
    # Path bulk joins pages that happen to be adjacent on both sides.
    sent = runs[0]["descriptors_per_room"]
    assert sent == descriptors if path == "slice" else descriptors / 2 < sent <= descriptors
    staged = next(run for run in runs if run["path"] == "staged")
    assert sum(share["descriptors"]["staged"] for share in shares) == staged["descriptors_per_room"]
    assert sum(share["bytes"] for share in shares) == runs[0]["bytes_per_room"]


@pytest.mark.sample
def test_the_plan_moves_nothing(kvctl: Any, socket_directory: Path):
    outcome = kvctl("bench", "--prefill-tp", "4", "--decode-dp", "2", "--plan", "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    shares = orjson.loads(outcome.out)["data"]
    assert len(shares) == 8
    # tests/kvctl/lab/ranks/test_plan.py has the shares; here ranks have their names.
    assert (shares[1]["writer"], shares[1]["reader"], shares[1]["bytes"]) == ("prefill-1", "decode-0", 32 << 20)
    assert (shares[1]["fleet"], shares[1]["writer_gpu"], shares[1]["reader_gpu"]) == ("", None, None)
    assert list(socket_directory.glob("*.lock")) == []


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is an NVIDIA GPU here")
@pytest.mark.parametrize("options", [[], ["--plan"]], ids=" ".join)
@pytest.mark.sample
def test_without_a_gpu_it_says_what_is_missing_and_what_to_do(kvctl: Any, options: list[str]):
    outcome = kvctl("bench", "--device", "cuda", *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert "install" in outcome.err


def test_a_path_that_takes_too_long_runs_fewer_rooms_and_that_is_said(spawn: Run):
    limited = ["--path", "staged", "--rooms", "400", "--layer-ms", "20", "--point-seconds", "0.5"]
    code, out, err = finish(spawn(*LOOPBACK, *TINY, *limited, "-o", "table"))
    assert (code, err) == (0, "")
    assert "rooms left out because of --point-seconds: staged " in out
    assert "every byte verified" in out


@pytest.mark.sample
def test_a_missing_engine_names_the_extra(spawn: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A finder in front of all others that knows of no nixl.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'nixl' else find(name, *more)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, _, err = finish(spawn())
    assert code == 1
    assert "pip install '.[nixl]'" in err
    assert "--transport loopback" in err


@pytest.mark.parametrize(("transport", "victim"), [("nixl", "prefill-1"), ("loopback", "decode-1")])
def test_a_rank_that_is_killed_ends_the_bench_and_is_named(
    spawn: Run, socket_directory: Path, transport: str, victim: str
):
    bench = spawn(*TWO_TO_TWO, *LONG, "--transport", transport, "-v")
    running(bench)
    pid = pid_of(socket_directory, victim)
    os.kill(pid, signal.SIGKILL)
    code, _, err = finish(bench)
    assert code == 1
    assert f'rank "{victim}" (pid {pid}) was killed by SIGKILL during staged, batch 1 of' in err
    assert "Traceback" not in err


def test_interrupting_before_anything_was_measured_prints_nothing(spawn: Run, socket_directory: Path):
    bench = spawn(*LOOPBACK, *TINY)
    until(lambda: ranks_of(socket_directory))
    bench.send_signal(signal.SIGINT)
    code, out, err = finish(bench)
    assert (code, out, err.strip()) == (130, "", "")


@pytest.mark.sample
def test_killing_the_bench_takes_the_ranks_and_their_files_along(spawn: Run, socket_directory: Path):
    bench = spawn(*LOOPBACK, *TWO_TO_TWO, *LONG, "-v")
    running(bench)
    bench.kill()
    until(lambda: not ranks_of(socket_directory))


def test_two_of_them_share_the_machine(spawn: Run):
    first = spawn(*LOOPBACK, *TWO_TO_TWO, *LONG, "-v")
    running(first)
    code, _, err = finish(spawn(*LOOPBACK, *TINY, "--path", "staged"))
    assert (code, err) == (0, "")
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == 130


def test_modes_and_transports_have_fleets_of_their_own_in_one_table(spawn: Run, tmp_path: Path):
    saved = tmp_path / "result.json"
    options = ["--prefill-cp", "2", "--cp-mode", "rank0,all-chunk", "--chunk-tokens", "16", "--path", "staged"]
    code, out, err = finish(spawn(*LOOPBACK, *TINY, *options, "--save", str(saved), "-o", "table"))
    assert (code, err) == (0, "")
    assert "rank0" in out
    assert "Δ rank0" in out
    document = orjson.loads(saved.read_bytes())
    assert [(run["cp_mode"], run["verified"]) for run in document["runs"]] == [("rank0", True), ("all-chunk", True)]
    assert [run["writes_per_room"] for run in document["runs"]] == [3, 3]
    assert document["runs"][0]["delta_ratio"] is None


def test_pipelines_stand_side_by_side_and_a_report_is_drawn(spawn: Run, tmp_path: Path):
    page, saved = tmp_path / "report.html", tmp_path / "result.json"
    options = ["--layers", "8", "--kv-heads", "4", "--head-dim", "16", "--tokens", "64", "--rooms", "4"]
    simulated = ["--pipeline", "off,2", "--layer-ms", "1", "--path", "staged"]
    files = ["--html", str(page), "--save", str(saved)]
    code, _, err = finish(spawn(*LOOPBACK, *options, *simulated, *files, "-o", "table"))
    assert (code, err) == (0, f"kvctl: the report is in {page}\n")
    off, on = orjson.loads(saved.read_bytes())["runs"]
    assert [(run["pipeline"], run["groups"]) for run in (off, on)] == [("off", 1), ("2", 4)]
    assert (off["pipeline_decisions"], on["pipeline_decisions"]) == ({"off": 4}, {"override": 4})
    assert off["compute_ms"]["p50"] >= 8
    assert on["hidden_ms"]["mean"] > 0
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "<svg" in text


@pytest.mark.sample
def test_interrupting_fleets_in_turns_prints_what_each_has_measured_and_leaves_nothing(spawn: Run):
    options = ["--prefill-cp", "2", "--cp-mode", "rank0,all", "--repeat", "1000", "--path", "staged", "-v"]
    bench = spawn(*LOOPBACK, *TINY, *options, "-o", "tsv")
    after(bench, "all: verifying staged")
    bench.send_signal(signal.SIGINT)
    code, out, err = finish(bench)
    assert code == 130
    header, *lines = (line.split("\t") for line in out.splitlines())
    assert [line[header.index("cp_mode")] for line in lines] == ["rank0", "all"]
    assert "Traceback" not in err


def test_beside_a_busy_engine(spawn: Run) -> None:
    engines = ["off", "prefill", "prefill:spin", "decode:launch", "both:long"]
    options = ["--path", "staged", "--rate", "100", "--busy-engine", ",".join(engines), "-o", "jsonl"]
    bench = spawn(*TINY, *LOOPBACK, *options)
    out, err = bench.communicate(timeout=110)
    assert bench.returncode == 0, err
    idle, *busy = rows = [orjson.loads(line) for line in out.splitlines()]
    assert {row["busy_engine"] for row in rows} == set(engines)
    assert all(row["verified"] and row["done_ms"]["p50"] >= 0 for row in rows)
    assert idle["engine_slowdown_ratio"] is None
    for row in busy:
        assert idle["asked_rooms_per_s"] == row["asked_rooms_per_s"] > 0
        assert row["served_rooms_per_s"] > 0
        assert row["engine_slowdown_ratio"] < 1
        assert row["engine_stall_ms"] > 0 <= row["engine_call_ms"]
