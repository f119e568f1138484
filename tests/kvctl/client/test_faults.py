"""Exit codes for combinations of answers and faults, and the text of faults."""

from __future__ import annotations

import pytest

from kvctl.client.faults import Fault, exit_code, lines
from kvctl.exit_codes import ExitCode


@pytest.mark.parametrize(
    ("answered", "codes", "expected"),
    [
        (2, [], ExitCode.OK),
        (0, [], ExitCode.NO_AGENT),
        (1, ["timeout"], ExitCode.PARTIAL),
        (0, ["timeout", "timeout"], ExitCode.TIMEOUT),
        (0, ["unreachable"], ExitCode.NO_AGENT),
        (0, ["not-permitted"], ExitCode.NOT_PERMITTED),
        (0, ["protocol", "timeout"], ExitCode.PROTOCOL),
        (0, ["unknown-command"], ExitCode.PROTOCOL),
        (0, ["internal"], ExitCode.FAILED),
        (0, ["unreachable", "timeout"], ExitCode.TIMEOUT),
    ],
)
def test_the_exit_code_says_what_happened(answered: int, codes: list[str], expected: ExitCode) -> None:
    assert exit_code(answered, [Fault("a", code, "") for code in codes]) is expected


def test_what_several_agents_say_is_said_once() -> None:
    faults = [Fault("a", "timeout", "silent"), Fault("b", "internal", "broken"), Fault("c", "timeout", "silent")]
    assert lines(faults) == ["a, c: silent", "b: broken"]
    assert lines([Fault("", "unreachable", "no agent found")]) == ["no agent found"]
