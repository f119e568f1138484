"""Exit codes of every mixture of answers and faults."""

from __future__ import annotations

import pytest

from kvctl.client.faults import Fault, exit_code
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
