"""What keeps an agent from serving: for now, or for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.errors import ConfigError, DeadlineExceeded
from kvctl_agent.protocol.peer import PeerState
from kvctl_agent.runtime.lifecycle import Lifecycle


def wait_for(state: PeerState) -> None:
    """Waits with a peer in this state."""
    peer = SimpleNamespace(name="prefill-0", state=state, differences=("the name decode-0 is in use",))
    roster = SimpleNamespace(refused="", missing="missing tp=1", complete=False)
    registries: Any = SimpleNamespace(roster=lambda instance: roster)
    machine: Any = SimpleNamespace(peers={"prefill-0": peer})
    local: Any = SimpleNamespace(name="decode-0", role="decode")
    unused: Any = None
    lifecycle = Lifecycle(local, ["ipc:///tmp/boot"], registries, machine, unused, unused)
    lifecycle.start()
    lifecycle.wait_ready(0)


def test_a_peer_that_refuses_us_ends_the_wait() -> None:
    with pytest.raises(ConfigError, match="prefill-0 and decode-0 do not fit: the name decode-0 is in use"):
        wait_for(PeerState.REFUSED)


def test_what_may_pass_does_not() -> None:
    """Our own last process, on a host that the peer cannot see, is silent for a few seconds before it is given up."""
    with pytest.raises(DeadlineExceeded, match="missing tp=1"):
        wait_for(PeerState.CONNECTING)
