"""`kvctl check` as a monitoring system calls it: its exit status is the verdict, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found, and nobody waits."""
    monkeypatch.setattr("kvctl.health.engine.CODES", ())
    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)


def test_a_fleet_that_is_well(calm: None, fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("check", "all")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "KVCTL OK - 4 agents | 'agents'=4;;;0; 'warnings'=0;;;0; 'criticals'=0;;;0;\n"
    assert kvctl("check").out == outcome.out
    assert kvctl("check", "all", "--agents", "5").code == 2


def test_findings_and_their_words(toy_codes: None, fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("check", "staging")
    assert outcome.code == 2
    first, second = outcome.out.splitlines()
    assert first.startswith("KVCTL STAGING CRITICAL - KV_RING_FULL decode-1 ring: prefill-0 was granted 24 MiB")
    assert second.startswith("WARNING: KV_RING_FULL decode-0 ring: ")
    assert kvctl("check", "peers").code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nothing",), "no command 'nothing'"),
        (("all", "--bogus"), "--bogus"),
        (("all", "-o", "xml"), "xml"),
        (("all", "--timeout", "soon"), "'soon' is not a duration"),
        (("peers", "--ignore", "KV_RING_FUL"), "there is no code KV_RING_FUL"),
        (("all", "-e", "udp://x/y"), "udp:// is not an address of an agent"),
    ],
)
def test_wrong_usage_is_unknown_and_says_so_on_stdout(
    args: tuple[str, ...], words: str, calm: None, kvctl: Any
) -> None:
    outcome = kvctl("check", *args)
    assert outcome.code == 3
    assert outcome.out.startswith("KVCTL UNKNOWN - ")
    assert words in outcome.out
    assert outcome.out.count("\n") == 1


def test_a_bug_of_ours_is_unknown(fleet: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)
    monkeypatch.setattr("kvctl.health.engine.examine", fail)
    outcome = kvctl("check", "all")
    assert (outcome.code, outcome.out) == (3, "KVCTL UNKNOWN - kvctl failed: ZeroDivisionError: boom\n")


def test_who_hangs_is_critical_everywhere_and_told_once(calm: None, hang: Any, start: Any, kvctl: Any) -> None:
    hang("hung")
    start("decode-0")
    outcome = kvctl("check", "all", "--timeout", "3s")
    assert kvctl("check", "transport", "--timeout", "300ms").code == 2
    assert outcome.code == 2
    assert outcome.out.startswith("KVCTL CRITICAL - hung: no answer within 3 s")
    assert outcome.out.count("hung: ") == 1


def test_who_was_killed_leaves_a_warning(calm: None, leave_stale: Any, start: Any, kvctl: Any) -> None:
    leave_stale("dead")
    start("decode-0")
    outcome = kvctl("check", "all")
    assert outcome.code == 1
    assert outcome.out.startswith("KVCTL WARNING - dead is gone and left its socket behind")
    assert kvctl("check", "rooms").code == 0


@pytest.mark.parametrize("form", ["json", "table", "prom"])
def test_every_form_has_the_same_status(form: str, toy_codes: None, fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("check", "all", "-o", form)
    assert outcome.code == 2
    assert "staging" in outcome.out
    if form == "json":
        rows = {row["check"]: row for row in outcome.data}
        assert rows["staging"]["state"] == "critical"
    if form == "prom":
        assert 'kvctl_check_findings{code="KV_RING_FULL",severity="warning"} 1\n' in outcome.out
