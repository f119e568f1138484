"""Mutes: which findings they cover, and when they end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.health.finding import Finding, Severity
from kvctl.health.mutes import Baseline, Mute, judge

HOUR = 3_600_000_000_000
FINDING = Finding(
    "KV_RING_PINNED", Severity.WARNING, "decode-0 allocation 7", ("decode-0", "prefill-1"), "cause", "remedy", weight=10
)


def mute(subject: str = "", baseline: Baseline | None = None, code: str = FINDING.code) -> Mute:
    return Mute(code, subject, 0, HOUR, "", baseline)


@pytest.mark.parametrize("subject", ["", "decode-0 allocation 7", "decode-0", "prefill-1"])
def test_a_mute_is_of_a_code_a_subject_or_an_agent(subject: str) -> None:
    judged = judge([FINDING], [mute(subject)], now_ns=1)
    assert judged.raised == []
    assert [finding for finding, _ in judged.muted] == [FINDING]


@pytest.mark.parametrize(
    ("subject", "code"), [("decode-1", FINDING.code), ("", "KV_RING_SMALL"), ("decode", FINDING.code)]
)
def test_others_are_heard(subject: str, code: str) -> None:
    assert judge([FINDING], [mute(subject, code=code)], now_ns=1).raised == [FINDING]


def test_a_mute_ends() -> None:
    assert judge([FINDING], [mute()], now_ns=HOUR - 1).raised == []
    assert judge([FINDING], [mute()], now_ns=HOUR).raised == [FINDING]


WORSE = {
    "severity": [replace(FINDING, severity=Severity.CRITICAL)],
    "weight": [replace(FINDING, weight=13)],
    "number": [FINDING, replace(FINDING, subject="decode-1 allocation 3")],
}


@pytest.mark.parametrize("what", WORSE)
def test_what_gets_worse_is_heard_whole(what: str) -> None:
    then = Baseline.of([FINDING])
    assert judge(WORSE[what], [mute(baseline=then)], now_ns=1).raised == WORSE[what]
    assert judge(WORSE[what], [mute(baseline=None)], now_ns=1).raised == []


def test_noise_is_not_worse() -> None:
    then = Baseline.of([FINDING])
    assert judge([replace(FINDING, weight=11.5)], [mute(baseline=then)], now_ns=1).raised == []


def test_a_broken_mute_does_not_break_another() -> None:
    then = Baseline.of([FINDING])
    worse = replace(FINDING, severity=Severity.CRITICAL)
    longer = replace(mute("decode-0"), until_ns=2 * HOUR)
    judged = judge([worse], [mute(baseline=then), longer], now_ns=1)
    assert judged.raised == []
    assert judged.muted == [(worse, longer)]


def test_of_two_mutes_the_one_that_lasts_is_told() -> None:
    longer = replace(mute("decode-0"), until_ns=2 * HOUR)
    assert judge([FINDING], [mute(), longer], now_ns=1).muted == [(FINDING, longer)]


FINDINGS = st.lists(
    st.builds(
        lambda code, severity, subject, weight: Finding(code, severity, subject, (subject,), "", "", weight=weight),
        st.sampled_from(["KV_A", "KV_B"]),
        st.sampled_from(Severity),
        st.sampled_from(["x", "y", "z"]),
        st.floats(0, 100),
    ),
    max_size=6,
)


@given(FINDINGS, st.sampled_from(["KV_A", "KV_B"]), st.sampled_from(["", "x", "y"]))
def test_what_was_there_when_it_was_muted_is_quiet_and_nothing_is_lost(
    findings: list[Finding], code: str, subject: str
) -> None:
    made = mute(subject, code=code)
    made = replace(made, baseline=Baseline.of([each for each in findings if made.covers(each)]))
    judged = judge(findings, [made], now_ns=1)
    assert all(not made.covers(each) for each in judged.raised)
    assert len(judged.raised) + len(judged.muted) == len(findings)
