"""Measures pairs of SGLang servers in turns: time to the first token, time per token, and tokens per second."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvctl.lab.bench.rows import delta_of
from kvctl.lab.bench.sglang_pairs import UNDIVIDED, Generated, Pair
from kvctl.lab.bench.sglang_servers import ServerError, Tokens, together, wait_ready
from kvctl.lab.bench.statistics import median, summary_ms
from kvctl.lab.bench.variants import sizes_text
from kvctl.lab.ranks.request import Load

SCHEMA = "kvctl.bench-servers/1"
_CHECKED_LENGTHS = (1, 15, 17, 100, 1000, 4097)
CHECKED_TOKENS = 16
"""Tokens that are generated after each prompt whose tokens are compared."""
_LEAST_REQUESTS, _REQUESTS_A_SLOT = 12, 3
_NOT_STARTED = (
    "not started: the undivided server, which has the same model and prefill's sizes, did not become ready; "
    "--verify off leaves it out"
)
_WARM_UP = -1  # in place of the number of a round

Round = Mapping[str, Any]


@dataclass
class Results:
    """What was measured and seen of one side.

    Attributes:
        rounds: figures of each round, by the number of the load.
        tokens: generated after each of the prompts whose tokens are compared.
        failures: what failed: servers, or requests.
    """

    pair: Pair
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    tokens: list[Tokens] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class ServerBench:
    """The bench of all sides.

    Args:
        pairs: one for each side, the undivided server first if there is one.
        seed: of the prompts, which are the same for all sides.
        finished: called after each load of a round and side.
        requests: of each load, round and side; None: three for each of those at a time, at least twelve.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        loads: Sequence[Load],
        rounds: int,
        output_tokens: int,
        seed: int,
        step: Callable[[str], None],
        finished: Callable[[], None],
        requests: int | None = None,
        check: bool = True,
    ) -> None:
        self.results = [Results(pair) for pair in pairs]
        self._loads = loads
        self._rounds = rounds
        self._output_tokens = output_tokens
        self._seed = seed
        self._step = step
        self._finished = finished
        self._requests = requests
        self._check = check

    def run(self, all_at_once: bool) -> None:
        """Starts and measures all sides in turns, or one after another; what fails is noted in the results.

        If the undivided server comes first and does not start, the sides after it are not started.
        All servers have ended when it returns or raises.
        """
        groups = [self.results] if all_at_once else [[each] for each in self.results]
        for group in groups:
            # Requests that are under way fail once their servers have ended: the threads are waited for last.
            with ThreadPoolExecutor(max(load.concurrency for load in self._loads)) as pool, _ended(group):
                ready = self._start(group)
                self._measure(ready, pool)
            if not ready and group[0].pair.prefill is None and not all_at_once:
                for each in self.results[1:]:
                    each.failures.append(_NOT_STARTED)
                break

    def _start(self, group: Sequence[Results]) -> list[Results]:
        """Starts the servers of a group together; returns the sides that are ready."""
        names = ", ".join(each.pair.side.text for each in group)
        self._step(f"{names}: starting servers")
        for each in group:
            for process in each.pair.fleet.processes:
                process.start()
        ready = []
        for each in group:
            with self._noted(each):
                wait_ready(each.pair.fleet.processes, partial(self._step_of, each))
                ready.append(each)
        return ready

    def _step_of(self, of: Results, text: str) -> None:
        self._step(f"{of.pair.side.text}: {text}")

    @contextlib.contextmanager
    def _noted(self, results: Results) -> Iterator[None]:
        """Notes an error of the servers in the results, and of those that have ended the end of their logs."""
        try:
            yield
        except ServerError as error:
            self._step_of(results, f"failed: {str(error).partition(chr(10))[0]}")
            found = [str(error)]
            for process in results.pair.fleet.processes:
                try:
                    process.check()
                except ServerError as ended:
                    found.append(str(ended))
            results.failures += dict.fromkeys(found)

    def _measure(self, group: Sequence[Results], pool: ThreadPoolExecutor) -> None:
        for each in group:
            with self._noted(each):
                if self._check:
                    self._step_of(each, "comparing tokens")
                    # In a thread, which Ctrl-C does not wait for.
                    each.tokens = [
                        pool.submit(each.pair.generate, prompt, CHECKED_TOKENS).result().tokens
                        for prompt in self._checked_prompts(each.pair)
                    ]
                self._step_of(each, "warming up")
                for number, load in enumerate(self._loads):
                    self._send(each.pair, number, _WARM_UP, load.concurrency, pool)
        for number in range(self._rounds):
            for at, load in enumerate(self._loads):
                total = self._requests or max(_LEAST_REQUESTS, _REQUESTS_A_SLOT * load.concurrency)
                for each in group if number % 2 == 0 else reversed(group):
                    if each.failures:
                        continue
                    self._step_of(each, f"{load_text(load)}, round {number + 1}")
                    with self._noted(each):
                        each.rounds.setdefault(at, []).append(self._send(each.pair, at, number, total, pool))
                    self._finished()

    def _checked_prompts(self, pair: Pair) -> list[Tokens]:
        longest = max(load.tokens.longest for load in self._loads)
        lengths = sorted({*(each for each in _CHECKED_LENGTHS if each < longest), longest})
        return [pair.prompt(length, random.Random(f"{self._seed} {length}")) for length in lengths]

    def _send(self, pair: Pair, at: int, number: int, total: int, pool: ThreadPoolExecutor) -> Round:
        """Sends requests of a load, its concurrency at a time; raises ServerError if a request failed."""
        load = self._loads[at]
        source = random.Random(f"{self._seed} {at} {number}")
        lengths = load.tokens.draw(total, source)
        prompts = [pair.prompt(length, source) for length in lengths]
        waiting = iter(prompts)

        def one_after_another() -> list[Generated]:
            return [pair.generate(prompt, self._output_tokens) for prompt in waiting]

        started = time.perf_counter()
        senders = [pool.submit(one_after_another) for _ in range(load.concurrency)]
        wait(senders)  # also if one of them fails: the next side has all the threads
        answers = [answer for sender in senders for answer in sender.result()]
        took = time.perf_counter() - started
        return {
            "rooms": total,
            "rooms_per_s": total / took,
            "tokens_per_s": sum(lengths) / took,
            "output_tokens_per_s": total * self._output_tokens / took,
            "ttft_ms": summary_ms(1e9 * each.first_s for each in answers),
            "tpot_ms": summary_ms(1e9 * each.token_s for each in answers if each.token_s is not None),
        }

    # ---- what was found ---------------------------------------------------------------------------------------------

    def reference(self) -> Results | None:
        """Returns the side whose tokens the others must generate: the undivided server, where there is one.

        It is the first side instead if prefill and decode differ in their sizes and compute on GPUs in 16 bits: the
        order of a sum, which differs then, may change tokens.
        """
        known = [each for each in self.results if each.tokens]
        plan = self.results[0].pair.plan
        exact = plan.prefill == plan.decode or not plan.prefill_gpus
        return next((each for each in known if exact or each.pair.prefill is not None), None)

    def differing(self, of: Results) -> list[int] | None:
        """Returns after how many tokens of a prompt a side generated others than the reference; None if unknown."""
        reference = self.reference()
        comparable = reference is not None and of.tokens and (of.pair.prefill is not None or reference is of)
        if reference is None or not comparable or len(self.results) < 2:
            return None
        lengths = [len(prompt) for prompt in self._checked_prompts(of.pair)]
        return [length for length, mine, its in zip(lengths, of.tokens, reference.tokens, strict=True) if mine != its]

    def problems(self) -> list[str]:
        """Returns a line for each failure, and for each side whose tokens differ."""
        found = [f"{each.pair.side.text}: {line}" for each in self.results for line in each.failures]
        reference = self.reference()
        for each in self.results:
            if (lengths := self.differing(each)) and reference is not None:
                found.append(
                    f"{each.pair.side.text}: tokens differ from those of {reference.pair.side.text} after prompts of "
                    f"{', '.join(map(str, lengths))} tokens"
                )
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each load and side that was measured; rows of one load are adjacent."""
        rows = []
        for at, load in enumerate(self._loads):
            of_load = [self._row(each, at, load) for each in self.results if each.rounds.get(at)]
            alone = next((row for row in of_load if row["side"] == UNDIVIDED), None)
            divided = [row for row in of_load if row is not alone]
            for row in of_load:
                for name, value in _COMPARED.items():
                    first = divided[0] if divided else row
                    delta = (None, None) if row is first or row is alone else delta_of(first, row, value)
                    row |= dict(zip((f"{name}_ratio", f"{name}_significant"), delta, strict=True))
                over = None if row is alone or alone is None else delta_of(alone, row, _mean_ttft)
                row["overhead_ratio"] = None if over is None else over.ratio
            rows += of_load
        return rows

    def _row(self, of: Results, at: int, load: Load) -> dict[str, Any]:
        rounds, plan = of.rounds[at], of.pair.plan
        differing = self.differing(of)
        return {
            "side": of.pair.side.text,
            "concurrency": load.concurrency,
            "tokens": load.tokens.mean if load.tokens.mean % 1 else int(load.tokens.mean),
            "tokens_drawn": load.tokens.text,
            "output_tokens": self._output_tokens,
            "prefill": sizes_text(plan.prefill),
            "decode": sizes_text(plan.decode if of.pair.prefill is not None else plan.prefill),
            "device": "cuda" if plan.prefill_gpus else "cpu",
            "page_size": plan.page_size,
            "rooms": sum(each["rooms"] for each in rounds),
            "verified": None if differing is None else not differing,
            **{name: _median([each[name] for each in rounds]) for name in rounds[0] if name != "rooms"},
            "rounds": rounds,
        }


def load_text(load: Load) -> str:
    """Formats a load: `1,024 tokens, 16 at a time`."""
    lengths = load.tokens.text
    return (f"{int(lengths):,}" if lengths.isdecimal() else lengths) + f" tokens, {load.concurrency} at a time"


def _mean_ttft(row: Mapping[str, Any]) -> float | None:
    mean: float | None = row["ttft_ms"]["mean"]
    return mean


def _mean_tpot(row: Mapping[str, Any]) -> float | None:
    mean: float | None = row["tpot_ms"]["mean"]
    return mean


_COMPARED: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "ttft_delta": _mean_ttft,
    "tpot_delta": _mean_tpot,
    "delta": lambda row: row["output_tokens_per_s"],
}


def _median(values: Sequence[Any]) -> Any:
    """Returns the median of numbers, or of each number of mappings; None if a value is unknown."""
    if isinstance(values[0], Mapping):
        return {name: _median([each[name] for each in values]) for name in values[0]}
    return None if None in values else median(values)


@contextlib.contextmanager
def _ended(group: Sequence[Results]) -> Iterator[None]:
    try:
        yield
    finally:
        together([each.pair.fleet.end for each in group])
