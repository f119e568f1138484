"""Mutes: which findings they cover, and when they end."""

from __future__ import annotations

import contextlib
import json
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import CliError
from kvctl.health.finding import Finding, Severity
from kvctl.health.mutes import Baseline, Mute, default_path, edit, judge, load

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


MUTE = Mute("KV_RING_PINNED", "decode-0", 1, 2, "known", Baseline(Severity.WARNING, 1.5, 2))


def keep(file: Path, *mutes: Mute) -> None:
    with edit(file) as kept:
        kept[:] = mutes


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "kvctl" / "mutes.json"
    assert load(file) == []
    bare = Mute("KV_IDLE", "", 3, 4, "", None)
    keep(file, MUTE, bare)
    assert load(file) == [MUTE, bare]


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "kvctl" / "mutes.json"
    keep(file, MUTE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["mutes.json"]


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mutes.json"
    keep(file, MUTE)

    def change_and_fail() -> None:
        with edit(file) as kept:
            kept.clear()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change_and_fail()
    assert load(file) == [MUTE]


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "mutes.json"

    def add(number: int) -> None:
        with edit(file) as kept:
            kept.append(Mute("KV_IDLE", str(number), 0, 1, "", None))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {mute.subject for mute in load(file)} == {str(number) for number in range(8)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"version": 2, "mutes": []}', "version 2, this kvctl supports 1"),
        ('{"version": 1, "mutes": [{}]}', "baseline"),
        (json.dumps({"version": 1, "mutes": [{"code": 7, "baseline": None}]}), "7 is not a string"),
    ],
)
def test_what_is_no_file_of_mutes_is_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mutes.json"
    file.write_text(text)
    with pytest.raises(CliError, match="repair it or delete it") as error:
        load(file)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["version", "mutes", "code", "baseline", "until_ns", "severity"]), inner, max_size=4
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_stands_in_it_only_that_error_comes(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(text)
    with contextlib.suppress(CliError):
        load(file)


def test_where_it_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "kvctl").write_text("a file where a directory should be")
    with pytest.raises(CliError, match="mutes cannot be stored there"):
        keep(tmp_path / "kvctl" / "mutes.json", MUTE)
    assert load(tmp_path / "kvctl" / "mutes.json") == []


def test_a_user_without_home_can_read_and_is_told_when_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CliError, match="set XDG_STATE_HOME"):
        default_path()
