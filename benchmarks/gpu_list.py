"""Runs the list of `kvctl bench` commands for GPUs one after another and prints one table: claim, target, measured.

Every result is saved beside `list.json`, which contains the table as data. Benches for which no time remains are not
run, and the table says so. `benchmarks/gpu.sh` calls this on a GPU host; `--rehearse` runs tiny shapes in host memory.

    python benchmarks/gpu_list.py --seconds 500 --out results
    python benchmarks/gpu_list.py --only unequal-1024,direct-4096 --prefill-gpus 0 --decode-gpus 0
    python benchmarks/gpu_list.py --rehearse --transport loopback
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_claims import Bench, Claim, benches

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "kvctl.gpu-list/1"
# On SIGINT a bench prints and saves its results so far, and ends its ranks.
_STOP_S = 30.0


@dataclass
class Ran:
    """Outcome of one command of the list.

    Attributes:
        status: exit status; None if the command was not started.
        why_not: why the command was not started, was stopped or has no result; "" otherwise.
        stopped: whether the command was stopped because the time was up.
        document: the saved result; None if there is none.
    """

    bench: Bench
    command: list[str]
    status: int | None = None
    seconds: float = 0.0
    why_not: str = ""
    stopped: bool = False
    document: dict[str, Any] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all commands; returns 0 if every measured claim holds, every byte was verified and no bench failed."""
    options = _options().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.seconds
    wanted = [bench for bench in benches(options.slow) if not options.only or bench.name in options.only]
    ran = [_run(bench, options, ends) for bench in wanted]
    lines = [line for each in ran for line in _lines(each, options.rehearse)]
    saved = {
        "schema": SCHEMA,
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "rehearsal": options.rehearse,
        "env": next((each.document["env"] for each in ran if each.document is not None), {}),
        "claims": lines,
        "benches": [
            {
                "name": each.bench.name,
                "command": shlex.join(each.command),
                "environment": dict(each.bench.environment),
                "status": each.status,
                "seconds": round(each.seconds, 1),
                "why_not": each.why_not,
                "floors": each.document["floors"] if each.document is not None else {},
            }
            for each in ran
        ],
    }
    (options.out / "list.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    print(_table(lines))
    print(f"saved in {options.out}: list.json, and each bench's result and table")
    failed = any(each.status for each in ran if not each.stopped)
    return int(failed or any(line["result"] == "FAIL" for line in lines))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="time for everything together")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for results")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="names of benches, with commas")
    parser.add_argument("--prefill-gpus", default="0")
    parser.add_argument("--decode-gpus", default="1")
    parser.add_argument("--transport", default="", help="in place of nixl, but for the slow lane")
    parser.add_argument("--slow", choices=("mooncake", "ucx-tcp"), default="mooncake", help="the slow lane")
    parser.add_argument("--verify", choices=("full", "sample", "off"), default="full")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on host memory: nothing is judged")
    return parser


def _command(bench: Bench, options: argparse.Namespace, save: Path) -> list[str]:
    where = f"--device cuda --prefill-gpus {options.prefill_gpus} --decode-gpus {options.decode_gpus}"
    words = shlex.split(bench.tiny if options.rehearse else f"{bench.options} {where}")
    if options.transport and "--transport" not in words:
        words += ["--transport", options.transport]
    save_as = ["--save", str(save), "--html", str(save.with_suffix(".html"))]
    return [sys.executable, "-m", "kvctl", "bench", *words, "--verify", options.verify, "-o", "table", *save_as]


def _run(bench: Bench, options: argparse.Namespace, ends: float) -> Ran:
    """Runs one command until it ends or the time is up, and saves its output.

    Args:
        ends: end of the time for all commands, on the monotonic clock in seconds.
    """
    save = options.out / f"{bench.name}.json"
    save.unlink(missing_ok=True)
    ran = Ran(bench, _command(bench, options, save))
    left_s = ends - time.monotonic()
    if left_s < (1.0 if options.rehearse else bench.least_s):
        ran.why_not = f"{max(0.0, left_s):.0f} s were left"
        print(f"\n== {bench.name}: not run, {ran.why_not}", flush=True)
        return ran
    print(f"\n== {bench.name}: {shlex.join(ran.command[1:])}", flush=True)
    environment = {**os.environ, **bench.environment, "PYTHONPATH": _python_path(), "COLUMNS": "160"}
    started = time.monotonic()
    with subprocess.Popen(
        ran.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            out, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            ran.stopped, ran.why_not = True, "its time was up, what it had measured counts"
            process.send_signal(signal.SIGINT)
            try:
                out, _ = process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
    ran.seconds, ran.status = time.monotonic() - started, process.returncode
    print(f"{out.rstrip()}\n-- exit {ran.status} after {ran.seconds:.0f} s {ran.why_not}".rstrip(), flush=True)
    save.with_suffix(".txt").write_text(out, encoding="utf-8")
    if save.exists():
        ran.document = json.loads(save.read_bytes())
    elif not ran.why_not:
        ran.why_not = f"exit {ran.status}, see above"
    return ran


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def _lines(ran: Ran, rehearsal: bool) -> list[dict[str, Any]]:
    """Returns the lines of the table for one bench: one per claim, and one for the verification of all bytes."""
    lines = [_line(ran, claim) for claim in ran.bench.claims]
    if ran.document is not None:
        verified = ran.document["verified"]
        words = {True: ("yes", "PASS"), False: ("NO", "FAIL"), None: ("not looked at", "")}[verified]
        lines.append(
            {
                "bench": ran.bench.name,
                "claim": f"{ran.bench.name}: every byte verified",
                "target": "yes",
                "value": verified,
                "measured": words[0],
                "result": words[1],
            }
        )
    if rehearsal:
        for line in lines:
            line["result"] = "" if line["result"] in {"PASS", "FAIL"} and line["value"] is not False else line["result"]
    return lines


def _line(ran: Ran, claim: Claim) -> dict[str, Any]:
    value = claim.measure(ran.document) if ran.document is not None else None
    if value is None:
        done = "not measured" if ran.document is not None else "not run"
        measured, result = "-", f"{done}: {ran.why_not}" if ran.why_not else done
    else:
        bound = claim.at_least is not None or claim.at_most is not None
        measured = claim.show.format(value)
        result = ("PASS" if claim.holds(value) else "FAIL") if bound else ""
    return {
        "bench": ran.bench.name,
        "claim": claim.text,
        "target": claim.target,
        "value": value,
        "measured": measured,
        "result": result,
    }


def _table(lines: Sequence[dict[str, Any]]) -> str:
    heads = ("claim", "target", "measured", "result")
    widths = {head: max(len(head), *(len(line[head]) for line in lines)) if lines else len(head) for head in heads}
    rows = [{head: head.upper() for head in heads}, *lines]
    return "\n" + "\n".join("  ".join(row[head].ljust(widths[head]) for head in heads).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
