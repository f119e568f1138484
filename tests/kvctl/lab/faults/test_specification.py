"""Fault specifications: parsing, and error texts that name the valid values."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.faults.specification import FAULTS, FAULTS_BY_NAME, MESSAGES, FaultKind, parse_fault, parse_faults
from kvctl_agent.protocol.messages import AnyMessage

MS = 1_000_000
SECOND = 1_000 * MS


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("control-loss=5%", {"share": 0.05}),
        ("write-error=0.25%", {"share": 0.0025}),
        ("abort=100%", {"share": 1.0}),
        ("control-delay=50ms", {"ns": 50 * MS}),
        ("slow-reader=1.5s", {"ns": 1500 * MS}),
        ("clock-jump=-1h", {"ns": -3600 * SECOND}),
        ("clock-jump=-1d", {"ns": -24 * 3600 * SECOND}),
        ("kill=decode-0@1h30m", {"rank": "decode-0", "at_ns": 5400 * SECOND, "for_ns": None}),
        ("kill=decode-1@5s", {"rank": "decode-1", "at_ns": 5 * SECOND, "for_ns": None}),
        ("kill=p1-prefill-0@0s+2s", {"rank": "p1-prefill-0", "at_ns": 0, "for_ns": 2 * SECOND}),
        ("message-loss=room-failed", {"messages": ("room-failed",)}),
        ("message-loss=watermark+ack+watermark", {"messages": ("watermark", "ack")}),
        ("replace=prefill-1@4s+22s", {"rank": "prefill-1", "at_ns": 4 * SECOND, "for_ns": 22 * SECOND}),
        ("pause=prefill-0@5s+3s", {"rank": "prefill-0", "at_ns": 5 * SECOND, "for_ns": 3 * SECOND}),
    ],
)
def test_what_is_meant(text: str, meant: dict[str, object]) -> None:
    fault = parse_fault(text)
    assert fault.kind is FAULTS_BY_NAME[text.partition("=")[0]]
    assert {name: getattr(fault, name) for name in meant} == meant
    assert fault.text == text


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name)
def test_every_kind_has_an_example_that_can_be_read(kind: FaultKind) -> None:
    assert parse_fault(kind.example).kind is kind
    assert kind.help.endswith(".")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("control-los=5%", "did you mean control-loss"),
        ("fire", "there are control-loss, control-delay"),
        ("control-loss", "control-loss needs a value, such as control-loss=5%"),
        ("control-loss=", "at most 100%, such as control-loss=5%"),
        ("control-loss=0%", "more than 0%"),
        ("control-loss=101%", "at most 100%"),
        ("control-loss=5", "such as control-loss=5%"),
        ("control-delay=50", "not a time with a unit, such as control-delay=20ms"),
        ("control-delay=2h", "2h is not from 1e-06 to 3600 s"),
        ("control-delay=-1s", "is not from"),
        ("message-loss=staging-grant", "'staging-grant' is not one, did you mean staging-grants"),
        ("message-loss=5%", "'5%' is not one: there are hello, hello-ack"),
        ("message-loss=ack+", "'' is not one"),
        ("pause=decode-0@5s", "give a duration, such as pause=prefill-0@5s+3s"),
        ("replace=prefill-1@5s", "give a duration, such as replace=prefill-1@4s+22s"),
        ("pause=decode-0", "takes RANK@TIME+TIME"),
        ("kill=decode-0@soon", "'soon' is not a time"),
        ("kill=a/b@5s", "takes RANK@TIME"),
        ("abort=10%,abort=5%", "abort is given twice"),
        ("abort=10%,", "'' is not a fault"),
        ("", "is not a fault"),
    ],
)
def test_refusals_say_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_faults(text)


def test_ranks_may_be_struck_more_than_once() -> None:
    assert len(parse_faults("kill=decode-0@1s+1s, kill=decode-1@1s+1s,pause=decode-0@9s+1s")) == 3


def test_messages_are_named_as_on_the_wire() -> None:
    assert tuple(kind.__struct_config__.tag for kind in get_args(AnyMessage)) == MESSAGES


@given(st.text(max_size=40))
def test_anything_else_is_refused_in_words(text: str) -> None:
    if text.partition("=")[0] not in FAULTS_BY_NAME:
        with pytest.raises(ValueError, match=r"^.{1,1000}$"):
            parse_faults(text)
