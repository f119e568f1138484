"""Workers that have ended, are stopped or hang, for which an observer answers: their codes, and those of others."""

from __future__ import annotations

import pytest

from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import MS, Fleet, S, room_row

SGLANG = {"engine": "sglang", "engine_version": "0.5.23", "mode": "observe", "settings": {}}
NEW = ["KV_PROCESS_ENDED", "KV_PROCESS_STOPPED", "KV_LOOP_STARVED", "KV_ENGINE_SILENT"]


def ended(fleet: Fleet, name: str, ago_s: float = 12, **changes: object) -> None:
    """Lets an observer answer for an agent whose process has ended."""
    ago_ns = round(ago_s * S)
    fleet.hellos[name] |= {"ended_age_ns": ago_ns}
    fleet.status(name, **{"ended_age_ns": ago_ns, "ended_why": "killed by SIGKILL", "process_state": "gone", **changes})


def hung(fleet: Fleet, name: str, for_ns: int, state: str = "sleeping") -> None:
    """Lets the control loop of an agent not run, and its peers not hear it."""
    fleet.status(name, turn_age_ns=for_ns, process_state=state, engine_call="poll", engine_call_age_ns=for_ns)
    for other in fleet.answers:
        if other[0] != name[0]:
            fleet.peer(other, name, state="suspect" if for_ns < 10 * S else "lost", last_heard_ns=for_ns)


def codes(fleet: Fleet) -> list[tuple[str, str]]:
    return [(each.code, each.subject) for each in fleet.examine()]


class TestEnded:
    def test_with_rooms_open_is_critical_and_names_them(self) -> None:
        fleet = Fleet()
        ended(fleet, "decode-1")
        fleet.answers["decode-1"]["rooms"] = [room_row("decode-1", "77"), room_row("decode-1", "78", state="Success")]
        fleet.status("decode-1", rooms={"Transferring": 1, "Success": 1})
        (found,) = fleet.find("KV_PROCESS_ENDED")
        assert (found.severity, found.subject, found.since_ns) == (Severity.CRITICAL, "decode-1", 12 * S)
        assert found.cause == "decode-1 ended 12 s ago (killed by SIGKILL), with 1 room open (77)"
        assert found.remedy.startswith("`kvctl events -e decode-1` shows its last events")

    @pytest.mark.parametrize(
        ("ago_s", "rooms", "back", "severity"),
        [
            (12, 3, False, Severity.CRITICAL),
            (12, 0, False, Severity.WARNING),
            (700, 3, False, Severity.WARNING),
            (700, 0, False, Severity.INFO),
            (12, 3, True, Severity.WARNING),
            (12, 0, True, Severity.INFO),
            (700, 3, True, Severity.INFO),
            (700, 0, True, Severity.INFO),
        ],
    )
    def test_matters_less_once_it_is_back_and_after_ten_minutes(
        self, ago_s: int, rooms: int, back: bool, severity: Severity
    ) -> None:
        fleet = Fleet()
        name = "decode-1.ended-4711" if back else "decode-1"
        if back:
            fleet.answers[name] = fleet.copy().answers["decode-1"]
            fleet.hellos[name] = {**fleet.hellos["decode-1"], "name": name, "incarnation": "dead"}
            fleet.clocks[name] = fleet.clocks["decode-1"]
            fleet.answers[name]["status"] |= {"name": name, "incarnation": "dead"}
        ended(fleet, name, ago_s, rooms={"Transferring": rooms})
        (found,) = fleet.find("KV_PROCESS_ENDED")
        assert found.severity is severity
        assert ("decode-1 runs again" in found.cause) is back

    def test_what_it_left_is_not_examined_and_others_are_not_blamed(self) -> None:
        fleet = Fleet()
        ended(fleet, "decode-1", 100)
        fleet.room("decode-1", "77", state="Transferring", state_age_ns=200 * S, age_ns=200 * S)
        fleet.room("prefill-0", "77", state="Transferring", peers=["decode-1"], missing=["decode-1"], age_ns=200 * S)
        assert codes(fleet) == [("KV_PROCESS_ENDED", "decode-1")]

    def test_its_peers_tell_why_they_lost_it(self) -> None:
        fleet = Fleet()
        ended(fleet, "prefill-1")
        for name in ("decode-0", "decode-1"):
            error = "peer prefill-1 (incarnation 1) is lost: its process 4711 on node-3 has ended"
            fleet.peer(name, "prefill-1", state="lost", last_heard_ns=12 * S, last_error=error)
        assert codes(fleet) == [("KV_PROCESS_ENDED", "prefill-1"), ("KV_PEER_LOST", "prefill-1")]
        (found,) = fleet.find("KV_PROCESS_ENDED")
        assert found.cause.endswith("; decode-0 and decode-1 do not hear it")
        assert found.agents == ("prefill-1",)


class TestStopped:
    def test_is_named_with_its_rooms_at_once(self) -> None:
        fleet = Fleet()
        fleet.status("prefill-1", process_state="stopped", turn_age_ns=300 * MS, rooms={"Transferring": 2}, pid=4711)
        (found,) = fleet.examine()
        assert (found.code, found.severity, found.since_ns) == ("KV_PROCESS_STOPPED", Severity.CRITICAL, None)
        assert found.cause.startswith("prefill-1 is stopped (process 4711), with 2 rooms open (")
        assert found.remedy == "`kill -CONT 4711` lets it go on"

    def test_explains_why_its_peers_do_not_hear_it(self) -> None:
        fleet = Fleet()
        hung(fleet, "prefill-1", 12 * S, "stopped")
        assert codes(fleet) == [("KV_PROCESS_STOPPED", "prefill-1"), ("KV_PEER_LOST", "prefill-1")]
        (lost,) = fleet.find("KV_PEER_LOST")
        assert "heard nothing from prefill-1 for 12 s: it is stopped (process 4243)" in lost.cause
        assert lost.remedy == "`kill -CONT 4243` lets it go on"


class TestStarved:
    @pytest.mark.parametrize(
        ("for_ns", "severity"), [(1_400 * MS, None), (1_600 * MS, Severity.WARNING), (60 * S, Severity.CRITICAL)]
    )
    def test_grows_from_a_warning_to_critical(self, for_ns: int, severity: Severity | None) -> None:
        fleet = Fleet()
        hung(fleet, "decode-0", for_ns)
        assert [found.severity for found in fleet.find("KV_LOOP_STARVED")] == ([severity] if severity else [])

    @pytest.mark.parametrize(
        ("state", "words", "remedy"),
        [
            ("running", "its process 4242 runs in a call that keeps the Python interpreter (GIL)", "py-spy dump --nat"),
            ("sleeping", "its process 4242 waits in a call that keeps the Python interpreter", "py-spy dump --native"),
            ("uninterruptible", "waits in the kernel and cannot be interrupted", "cat /proc/4242/stack"),
        ],
    )
    def test_tells_what_the_process_does(self, state: str, words: str, remedy: str) -> None:
        fleet = Fleet()
        hung(fleet, "decode-0", 4 * S, state)
        (found,) = fleet.find("KV_LOOP_STARVED")
        assert found.cause.startswith("decode-0 has not run its control loop for 4 s: ")
        assert words in found.cause
        assert "its engine last called poll 4 s ago" in found.cause
        assert found.remedy.startswith(f"`{remedy}")

    def test_is_no_interruption_of_the_network(self) -> None:
        fleet = Fleet()
        for name in ("prefill-0", "prefill-1"):
            fleet.status(name, host="node-4")
        hung(fleet, "decode-0", 60 * S)
        assert {code for code, _ in codes(fleet)} == {"KV_LOOP_STARVED", "KV_PEER_LOST"}
        (lost,) = fleet.find("KV_PEER_LOST")
        assert lost.subject == "decode-0"
        assert "it has not run its control loop for 1m00s" in lost.cause


class TestSilentEngine:
    @pytest.mark.parametrize(
        ("for_ns", "severity"),
        [(900 * MS, None), (2 * S, Severity.INFO), (6 * S, Severity.WARNING), (31 * S, Severity.CRITICAL)],
    )
    def test_grows_with_the_time_since_its_latest_call(self, for_ns: int, severity: Severity | None) -> None:
        fleet = Fleet()
        fleet.status("decode-0", engine_call="poll", engine_call_age_ns=for_ns, integration=SGLANG)
        assert [found.severity for found in fleet.find("KV_ENGINE_SILENT")] == ([] if severity is None else [severity])

    @pytest.mark.parametrize(
        ("name", "engine", "severity"),
        [
            ("prefill-0", "sglang", Severity.CRITICAL),
            ("prefill-0", "vllm", Severity.INFO),
            ("decode-0", "vllm", Severity.CRITICAL),
            ("decode-0", None, Severity.INFO),
        ],
    )
    def test_is_no_fault_of_engines_that_may_have_no_reason_to_call(
        self, name: str, engine: str | None, severity: Severity
    ) -> None:
        fleet = Fleet()
        integration = None if engine is None else {**SGLANG, "engine": engine}
        fleet.status(name, engine_call="finish", engine_call_age_ns=31 * S, integration=integration)
        (found,) = fleet.find("KV_ENGINE_SILENT")
        assert found.severity is severity

    def test_names_the_call_and_the_place(self) -> None:
        fleet = Fleet()
        stack = ["managers/scheduler.py:940 Scheduler.event_loop", "nccl/comm.py:12 all_reduce"]
        fleet.status("decode-0", engine_call="layers", engine_call_age_ns=12 * S, engine_stack=stack)
        (found,) = fleet.examine()
        assert found.cause == (
            "the engine of decode-0 last called layers 12 s ago, with 12 rooms not finished, and its thread is in "
            "nccl/comm.py:12 all_reduce"
        )
        fleet.status("decode-0", engine_in_call=True)
        assert "has been in layers for 12 s" in fleet.examine()[0].cause

    @pytest.mark.parametrize(
        "changes",
        [
            {"rooms": {"Transferring": 0}},
            {"engine_call": "wait", "engine_in_call": True},
            {"engine_call": None, "engine_call_age_ns": None},
            {"turn_age_ns": 20 * S},
        ],
        ids=["no rooms", "it waits for a room", "it never called", "its control loop is starved"],
    )
    def test_is_none_of_its_own(self, changes: dict[str, object]) -> None:
        fleet = Fleet()
        fleet.status("decode-0", **{"engine_call": "poll", "engine_call_age_ns": 12 * S, **changes})
        assert fleet.find("KV_ENGINE_SILENT") == []


def test_agents_of_older_versions_have_none_of_these_codes() -> None:
    fleet = Fleet()
    for answers in fleet.answers.values():
        for key in [key for key in answers["status"] if key.startswith(("ended", "process_", "turn", "engine", "pub"))]:
            del answers["status"][key]
    assert [found for code in NEW for found in fleet.find(code)] == []
