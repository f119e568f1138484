"""Exit codes for combinations of answers and faults, and the text of faults."""

from __future__ import annotations

import pytest

from kvctl.client.faults import Fault, exit_code, lines, silence, silent_hosts
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


HOSTS = {f"{host}:{port}": host for host in ("n1", "n2", "n3") for port in range(4)}


def silent(*agents: str) -> list[Fault]:
    return [Fault(agent, "timeout", "no answer within 2 s") for agent in agents]


def test_a_host_stands_for_all_of_its_agents() -> None:
    one = silent("n2:0", "n2:1", "n2:2", "n2:3")
    assert lines(one, HOSTS) == ["host n2 (all 4 agents): no answer within 2 s"]
    assert lines([*one, *silent("n1:0")], HOSTS) == ["host n2 (all 4 agents), n1:0: no answer within 2 s"]
    assert lines(one[1:], HOSTS) == ["n2:1, n2:2, n2:3: no answer within 2 s"], "one of them answered"
    both = [*one, *silent(*(f"n1:{port}" for port in range(4)))]
    assert lines(both, HOSTS) == ["hosts n1 and n2 (all 8 agents): no answer within 2 s"]
    assert lines(one, dict.fromkeys(HOSTS, "n2")) == ["n2:0, n2:1, n2:2, n2:3: no answer within 2 s"], "one host"


def test_many_hosts_are_one_line() -> None:
    hosts = {f"n{host}:{port}": f"n{host}" for host in range(128) for port in range(8)}
    (line,) = lines(silent(*(agent for agent in hosts if agent > "n1")), hosts)
    assert line == "hosts n1, n2, n3 and 124 more (all 1016 agents): no answer within 2 s"
    assert len(lines(silent(*(agent for agent in hosts if agent.endswith(":3"))), hosts)[0]) < 200


def test_silent_hosts() -> None:
    refused = [Fault("n3:0", "not-permitted", "no key"), *silent("n3:1", "n3:2", "n3:3")]
    found = silent_hosts([*silent(*(f"n1:{port}" for port in range(4))), *refused, *silent("n2:1")], HOSTS)
    assert list(found) == ["n1"], "an agent that refuses is not silent"
    assert silence("n1", found["n1"]) == "host n1: 4 of 4 agents silent: no answer within 2 s"
