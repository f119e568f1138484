"""What keeps an agent from serving: for now, or for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.errors import ConfigError
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.runtime.readiness import check_fit


def check(state: PeerState) -> None:
    peer = SimpleNamespace(name="prefill-0", state=state, differences=("the name decode-0 is in use",))
    registries: Any = SimpleNamespace(roster=lambda instance: SimpleNamespace(refused=""))
    machine: Any = SimpleNamespace(peers={"prefill-0": peer})
    check_fit("decode-0", "decode", ["ipc:///tmp/boot"], registries, machine)


def test_a_peer_that_refuses_us_ends_the_wait() -> None:
    with pytest.raises(ConfigError, match="prefill-0 and decode-0 do not fit: the name decode-0 is in use"):
        check(PeerState.REFUSED)


def test_what_may_pass_does_not() -> None:
    """Our own last process, on a host that the peer cannot see, is silent for a few seconds before it is given up."""
    check(PeerState.CONNECTING)
