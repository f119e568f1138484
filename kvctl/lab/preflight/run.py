"""Drives a preflight: starts the process of each rank on its host, and lets pairs of them measure, host by host.

Everything runs on one thread. A host or a rank that fails is left out of what follows; it is a result, not an error.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from kvctl.client.clock import ClockOffset, estimate
from kvctl.lab.ranks.group import TICK_S, RankGroup, rank_names
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.process import GARBLED
from kvctl.lab.ranks.request import Role
from kvctl_agent.contract.choices import HOST

START_S = 90.0
"""Longest time to log in, start Python and import an engine, on a host that does it for several ranks."""
_STARTS_AT_ONCE = 8  # of one host; sshd refuses more than ten connections that have not logged in
_ANSWER_S = 10.0
_KEEP_ALIVE_S = 30.0
_CLOCK_ROUNDS = 4
_ENOUGH_FAILURES = 2
_HOST_WORD = "{host}"


class Command(dict[str, Any]):
    """A command to the process of a rank: the arguments of the method `do` of `worker.Worker`."""

    def __init__(self, do: str, **arguments: Any) -> None:
        super().__init__(arguments)
        self.do = do


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A rank of the layout, on a host; `device` is its GPU there, or HOST; `leads`: it stands for its host."""

    name: str
    role: Role
    host: str
    device: int
    leads: bool


def place_ranks(hosts: Sequence[str], plan: Plan, gpus: bool) -> list[PlannedRank]:
    """Distributes the ranks of a plan over hosts: prefill ranks over the first ones, decode ranks over the others.

    The hosts are divided in proportion to the ranks, and those of a role get equal numbers of its consecutive ranks; a
    single host gets all. On each host, the ranks get GPUs 0, 1, ….

    Raises:
        ValueError: there are more hosts than ranks of a role for them.
    """
    names = dict(zip(rank_names(plan["ranks"]), plan["ranks"], strict=True))
    of_role = {role: [name for name, rank in names.items() if rank["role"] == role] for role in get_args(Role)}
    prefill, decode = map(len, (of_role["prefill"], of_role["decode"]))
    count = min(max(1, round(len(hosts) * prefill / (prefill + decode))), max(1, len(hosts) - 1))
    parts = {"prefill": hosts[:count], "decode": hosts[count:] or hosts}
    placed: list[PlannedRank] = []
    used: Counter[str] = Counter()
    for role, ranks in of_role.items():
        own = parts[role]
        if len(own) > len(ranks):
            raise ValueError(
                f"{len(own)} of {len(hosts)} hosts for {len(ranks)} {role} ranks: give the layout, for example "
                f"--prefill-tp {max(1, len(hosts) // 2)} --decode-dp {max(1, len(hosts) - len(hosts) // 2)}"
            )
        for number, name in enumerate(ranks):
            host = own[number * len(own) // len(ranks)]
            placed.append(PlannedRank(name, role, host, used[host] if gpus else HOST, not used[host]))
            used[host] += 1
    return placed


@dataclass(frozen=True, slots=True)
class Options:
    """How ranks are started, and what they use.

    Attributes:
        ssh: command that runs a command on a host; the host replaces `{host}`, or is appended.
        python: command of a Python with kvctl and the engine on the hosts.
        deadline_s: longest time of each step: a connection, a message, a write.
    """

    transport: str
    params: Mapping[str, str]
    environment: Mapping[str, str]
    ports: tuple[int, ...]
    ssh: tuple[str, ...]
    python: tuple[str, ...]
    deadline_s: float

    def login(self, host: str) -> list[str]:
        """Returns the command line before a command that is to run on a host."""
        words = self.ssh if any(_HOST_WORD in word for word in self.ssh) else (*self.ssh, _HOST_WORD)
        return [word.replace(_HOST_WORD, host) for word in words]

    def program(self, host: str) -> list[str]:
        """Returns the command line that starts a rank's process on a host."""
        return [*self.login(host), *self.python, "-m", "kvctl.lab.preflight"]


@dataclass(slots=True)
class Results:
    """What was found; each part has only what was reached.

    Attributes:
        begun: answers to `Begin`, by rank.
        failed: why ranks take part no longer, by rank.
        clocks: clock of each host, by the rank that leads it.
        links: answers of `reach` for each port, by (source host, target host).
        writes: latest answer to `Write` with `wrong_bytes`, and the best rate and latency of all, by (prefill rank,
            decode rank).
        left_out: why pairs of ranks that take part were not measured, by (prefill rank, decode rank).
        devices: answers to `Devices` at the end, by rank.
    """

    begun: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, ClockOffset] = field(default_factory=dict)
    links: dict[tuple[str, str], list[Mapping[str, Any]]] = field(default_factory=dict)
    writes: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    devices: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Preflight:
    """One preflight; a context manager, whose end ends all processes.

    Args:
        addresses: of each host, as the SSH client knows it, the address at which others reach it; "" to find it out.
        ranks: the ranks of the layout, those of a role in order.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        ranks: Sequence[PlannedRank],
        pairs: Sequence[tuple[str, str]],
        options: Options,
        progress: Callable[[str], None],
    ) -> None:
        self._addresses = {host: given or host.rpartition("@")[2] for host, given in addresses.items()}
        self._ranks = {rank.name: rank for rank in ranks}
        self._leaders = {rank.host: rank.name for rank in ranks if rank.leads}
        self._pairs = pairs
        self._options = options
        self._progress = progress
        self._token = secrets.token_hex(16)
        self._group = RankGroup()
        self._measured: set[tuple[str, str]] = set()
        self._unfinished: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._keep_alive_at = time.monotonic() + _KEEP_ALIVE_S
        self.results = Results()

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()

    def run(self) -> None:
        """Fills `results`."""
        self._start()
        self._read_clocks()
        self._reach()
        self.measure(self._pairs)
        asked, begun = {}, self.results.begun
        for name in self._alive():
            peers = {end for pair in self.results.writes if name in pair for end in pair} - {name}
            asked[name] = Command("devices", peers=sorted({begun[peer]["address"] for peer in peers & begun.keys()}))
        self.results.devices = self._ask(asked, _ANSWER_S, "reading its network devices")

    def measure(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Measures pairs between hosts that reach each other, one pair at a time on each host."""
        left = [pair for pair in pairs if self._reachable(*pair)]
        count = len(left)
        while left:
            chosen = list(_disjoint(left, lambda name: self._ranks[name].host))
            self._progress(f"measuring pair {count - len(left) + 1} to {count - len(left) + len(chosen)} of {count}")
            left = [pair for pair in left if pair not in chosen]
            ready = [pair for pair in chosen if self._is_ready(pair)]
            self._measure_at_once(ready)
            # A write that was given up may have landed in the memory of its decode rank meanwhile.
            unfinished = {decode for pairs in self._unfinished.values() for _, decode in pairs}
            wrong = [pair for pair in ready if self.results.writes.get(pair, {}).get("wrong_bytes")]
            self._measure_at_once([pair for pair in wrong if pair[1] in unfinished])
            for pair in ready:
                written, ends = self.results.writes.get(pair), self._ends(pair)
                if written is not None and written["error"]:
                    self._unfinished.setdefault(ends, []).append(pair)
                elif written is not None:
                    self._measured.add(ends)

    def _start(self) -> None:
        of_host: dict[str, list[PlannedRank]] = {}
        for rank in self._ranks.values():
            of_host.setdefault(rank.host, []).append(rank)
        most = max(map(len, of_host.values()))
        for first in range(0, most, _STARTS_AT_ONCE):
            wave = [rank for ranks in of_host.values() for rank in ranks[first : first + _STARTS_AT_ONCE]]
            self._progress(f"starting {len(wave)} of {len(self._ranks)} ranks on {len(of_host)} hosts")
            begins: dict[str, Command] = {}
            for rank in wave:
                try:
                    self._group.launch(rank.name, program=self._options.program(rank.host), stdio=True)
                except OSError as error:
                    self.results.failed[rank.name] = f"{self._options.ssh[0]} cannot be started: {error.strerror}"
                    continue
                begins[rank.name] = Command(
                    "begin",
                    name=rank.name,
                    role=rank.role,
                    transport=self._options.transport,
                    params=dict(self._options.params),
                    environment=dict(self._options.environment),
                    device=rank.device,
                    address=self._addresses[rank.host],
                    ports=self._options.ports,
                    token=self._token,
                    leads=rank.leads,
                )
            self.results.begun |= self._ask(begins, START_S, "starting")

    def _read_clocks(self) -> None:
        leaders = [name for name in self._leaders.values() if name in self._alive()]
        for _ in range(_CLOCK_ROUNDS):
            for name in leaders:  # one after the other: the answers of others would lengthen the round trip
                sent_ns = time.time_ns()
                answer = self._ask({name: Command("clock")}, _ANSWER_S, "reading its clock")
                if name in answer:
                    clock = estimate(sent_ns, time.time_ns(), answer[name]["now_ns"])
                    best = self.results.clocks.get(name)
                    if best is None or clock.error_ns < best.error_ns:
                        self.results.clocks[name] = clock

    def _reach(self) -> None:
        wanted = {
            ends
            for pair in self._pairs
            for ends in (self._ends(pair), self._ends((pair[1], pair[0])))
            if ends[0] != ends[1] and all(self._leaders[host] in self._alive() for host in ends)
        }
        left = sorted(wanted)
        while left:
            chosen = list(_disjoint(left, lambda host: host))
            left = [link for link in left if link not in chosen]
            self._progress(f"connecting hosts: {len(wanted) - len(left)} of {len(wanted)}")
            asked = {
                self._leaders[source]: Command(
                    "reach",
                    **{key: self.results.begun[self._leaders[target]][key] for key in ("address", "ports")},
                    token=self._token,
                    timeout_s=self._options.deadline_s,
                )
                for source, target in chosen
            }
            ports = max(1, len(self._options.ports))
            answers = self._ask(asked, 5 * ports * self._options.deadline_s + 30.0, "connecting to another host")
            for source, target in chosen:
                if self._leaders[source] in answers:
                    self.results.links[source, target] = answers[self._leaders[source]]["ports"]

    def _measure_at_once(self, pairs: Sequence[tuple[str, str]]) -> None:
        ready = self._ask({decode: Command("expect") for _, decode in pairs}, _ANSWER_S, "clearing its memory")
        begun = self.results.begun
        asked = {
            prefill: Command(
                "write",
                peer=decode,
                **{key: begun[decode][key] for key in ("metadata", "addr", "nbytes", "device")},
                same_host=begun[decode]["processes"] == begun[prefill]["processes"],
                timeout_s=self._options.deadline_s,
            )
            for prefill, decode in pairs
            if decode in ready
        }
        written = self._ask(asked, 3 * self._options.deadline_s + 15.0, "writing to its peer")
        for prefill, decode in pairs:
            if prefill in asked and prefill not in written:
                # An engine that opens a connection may wait for the kernel, which gives up after two minutes.
                text = f"{prefill}: {self.results.failed[prefill]}"
                self.results.writes[prefill, decode] = {"error": text, "overdue": True, "wrong_bytes": False}
        checks = {
            decode: Command("check", nbytes=written[prefill]["nbytes"])
            for prefill, decode in pairs
            if prefill in written
        }
        checked = self._ask(checks, 15.0, "comparing its memory")
        for prefill, decode in pairs:
            if prefill not in written or decode not in checked:
                continue
            found = written[prefill]
            wrong = not found["error"] and found["crc32"] != checked[decode]["crc32"]
            best = {}
            if "gb_per_s" in found and "gb_per_s" in (before := self.results.writes.get((prefill, decode), {})):
                best["gb_per_s"] = max(before["gb_per_s"], found["gb_per_s"])
                best["latency_ns"] = min(before["latency_ns"], found["latency_ns"])
            self.results.writes[prefill, decode] = {**found, **best, "wrong_bytes": wrong}

    def _ask(self, commands: Mapping[str, Command], timeout_s: float, doing: str) -> dict[str, Mapping[str, Any]]:
        """Sends commands and returns the answers by rank; ranks that give none have failed. Asks no failed rank."""
        deadline = time.monotonic() + timeout_s
        waiting = {name: self._group.processes[name] for name in commands if name not in self.results.failed}
        for name, process in waiting.items():
            process.answer = None  # `send` is not called for a process that has ended
            if process in self._group.running:
                process.send(commands[name])
        answers: dict[str, Mapping[str, Any]] = {}
        while True:
            for name, process in list(waiting.items()):
                if process.answer is not None:
                    answers[name] = process.answer
                elif process.fatal is not None or process not in self._group.running:
                    self.results.failed[name] = _end_of(process.fatal, process.returncode, process.last_output)
                else:
                    continue
                del waiting[name]
            left_s = deadline - time.monotonic()
            if not waiting or left_s <= 0:
                break
            if time.monotonic() > self._keep_alive_at:
                self._keep_alive_at = time.monotonic() + _KEEP_ALIVE_S
                for process in self._group.running:
                    process.send(Command("keep_alive"))
            self._group.poll(min(left_s, TICK_S))
        for name, process in waiting.items():
            last = _last_line(process.last_output)
            self.results.failed[name] = f"it has not finished {doing} within {timeout_s:g} s; {last}"
        return answers

    def _is_ready(self, pair: tuple[str, str]) -> bool:
        """Returns whether a pair is worth its time: of hosts between which only failures are seen, two pairs are."""
        ends = self._ends(pair)
        failed = self._unfinished.get(ends, [])
        if len(failed) >= _ENOUGH_FAILURES and ends not in self._measured:
            names = " and ".join(f"{prefill} → {decode}" for prefill, decode in failed[:_ENOUGH_FAILURES])
            self.results.left_out[pair] = f"not measured, because {names} between the same hosts failed"
            return False
        return self.results.failed.keys().isdisjoint(pair)

    def _ends(self, pair: tuple[str, str]) -> tuple[str, str]:
        return self._ranks[pair[0]].host, self._ranks[pair[1]].host

    def _alive(self) -> list[str]:
        return [name for name in self.results.begun if name not in self.results.failed]

    def _reachable(self, prefill: str, decode: str) -> bool:
        """Returns whether two ranks can be measured. A host that could listen on no port may yet be reached."""
        ends = self._ends((prefill, decode))
        if not {prefill, decode} <= set(self._alive()):
            return False
        links = [*self.results.links.get(ends, ()), *self.results.links.get((ends[1], ends[0]), ())]
        states = {each["state"] for each in links}
        return not links or ("ok" in states and "large lost" not in states)


def _disjoint(pairs: Sequence[tuple[str, str]], place: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yields pairs of which no two have a place in common."""
    taken: set[str] = set()
    for pair in pairs:
        ends = {place(each) for each in pair}
        if taken.isdisjoint(ends):
            taken |= ends
            yield pair


def _end_of(fatal: Mapping[str, Any] | None, returncode: int | None, output: str) -> str:
    if fatal is not None and fatal.get("code") == GARBLED:
        return f"{fatal.get('message')}: a login there must print nothing on stdout"
    if fatal is not None:
        return f"{fatal.get('message')} ({fatal.get('code')}); {_last_line(output)}"
    code = returncode or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"its process has ended with {how}; {_last_line(output)}"


def _last_line(output: str) -> str:
    return f"its last output: {output.splitlines()[-1]}" if output else "it printed nothing"
