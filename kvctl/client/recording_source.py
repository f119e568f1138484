"""A recording or a bundle in place of a living fleet: it is asked the same questions and gives the same answers."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kvctl.client.calls import Call
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.fleet_snapshot import AgentSnapshot, FleetSnapshot
from kvctl.client.labels import matches
from kvctl.client.recorded_answers import Absent, AgentHistory, answer
from kvctl.client.recording_reader import load, understood


class RecordingSource:
    """Answers from one moment of a file; a `Source`.

    Args:
        endpoints: names, globs or addresses of agents; empty means all that are in the file.
        labels: as of a live fleet.
        at: index of the moment to begin with.

    Attributes:
        moments: when each moment was, wall clock, ns.
        moment: index of the present one.

    Raises:
        CliError: the file cannot be read.
    """

    def __init__(
        self, path: Path, endpoints: Sequence[str] = (), labels: Mapping[str, str] | None = None, *, at: int = -1
    ) -> None:
        self._path = path
        self._endpoints = endpoints
        self._labels = labels or {}
        self._file = load(path)
        self._pasts: dict[tuple[str, str], AgentHistory] = {}
        self._remembered = 0  # moments that are in the pasts
        self.moments: Sequence[int] = self._file.at_ns
        self.moment = 0
        self.seek(at % len(self.moments))

    def __enter__(self) -> RecordingSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def seek(self, index: int) -> None:
        """Makes that moment the present one.

        Raises:
            IndexError: there is no such moment.
        """
        if not 0 <= index < len(self.moments):
            raise IndexError(f"{self._path} has {len(self.moments)} moments, and none with index {index}")
        self.moment = index

    def advance(self) -> bool:
        """Goes on to the next moment; False, and stays, at the last."""
        if self.moment + 1 == len(self.moments):
            return False
        self.moment += 1
        return True

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """What the agents answered at the present moment; clocks are as sharp as they were measured then."""
        moment = self._file[self.moment]
        chosen, faults = self._chosen(moment)
        stale = [each for each in moment.discovery.stale if not self._endpoints or _wanted(each, self._endpoints)]
        found = Discovery(moment.discovery.directory, [each.endpoint for each in chosen], stale, faults)
        survey = Survey(found, faults=list(faults), at_ns=moment.at_ns, tick_ns=moment.at_ns)
        with understood(self._path):
            for seen in chosen:
                self._admit(seen, calls, survey)
        survey.agents.sort(key=lambda agent: agent.name)
        survey.remarks.insert(0, self._when())
        return survey

    def _admit(self, seen: AgentSnapshot, calls: Sequence[Call], survey: Survey) -> None:
        if seen.answer is None:
            if seen.fault is not None:
                survey.faults.append(seen.fault)
            return
        if self._labels:
            status = seen.answer.data.get("status")
            if status is None:
                survey.faults.extend(fault for command, fault in seen.refused.items() if command == "status")
                return
            if not matches(self._labels, status):
                survey.filtered += 1
                return
        agent = AgentAnswer(seen.endpoint, seen.answer.hello, seen.answer.rtt_ns, seen.answer.clock)
        for call in calls:
            try:
                agent.data[call.command] = answer(seen, lambda: self._past(seen), call)
            except Absent as absent:
                survey.faults.append(absent.fault)
        if any(not rank["timeline"] and not rank["timeline_dropped"] for rank in agent.data.get("room", ())):
            survey.remarks.append(f"{agent.name}: the timeline of this room was left out of {self._path.name}")
        survey.agents.append(agent)

    def _past(self, seen: AgentSnapshot) -> AgentHistory:
        """What the file tells of this life of the agent up to now, and perhaps beyond."""
        while self._remembered <= self.moment:
            for each in self._file[self._remembered].seen:
                if each.answer is not None:
                    self._pasts.setdefault(each.life, AgentHistory()).add(each)
            self._remembered += 1
        return self._pasts[seen.life]

    def _chosen(self, moment: FleetSnapshot) -> tuple[list[AgentSnapshot], list[Fault]]:
        """Agents that the user asks for, in the order of the request, and who of them is not there."""
        discovery = moment.discovery
        if not self._endpoints:
            return list(moment.seen), list(discovery.faults)
        chosen: list[AgentSnapshot] = []
        faults: list[Fault] = []
        for wanted in self._endpoints:
            named = [each for each in moment.seen if _wanted(each.endpoint, (wanted,))]
            chosen += [each for each in named if each not in chosen]
            told = [fault for fault in discovery.faults if fault.agent == wanted]
            gone = [each for each in discovery.stale if _wanted(each, (wanted,))]
            if told:
                faults += told
            elif gone:
                faults += [
                    Fault(each.name, FaultCode.UNREACHABLE, "the agent was gone and had left its socket")
                    for each in gone
                ]
            elif not named:
                faults.append(Fault(wanted, FaultCode.UNREACHABLE, self._unknown(wanted, moment)))
        return chosen, faults

    def _unknown(self, wanted: str, moment: FleetSnapshot) -> str:
        names = [each.endpoint.name for each in moment.seen]
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(names)}" if names else ""
        return f"{self._path} has no agent {wanted}{hint}"

    def _when(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.moments[self.moment] / 1e9))
        count = len(self.moments)
        place = f", moment {self.moment + 1} of {count}; -w shows them all" if count > 1 else ""
        return f"{self._path.name} as of {at}{place}"


def _wanted(endpoint: Endpoint, wanted: Sequence[str]) -> bool:
    return any(
        each in {endpoint.address, str(endpoint.path)} if "/" in each else fnmatch.fnmatchcase(endpoint.name, each)
        for each in wanted
    )
