"""Interface through which the read-only admin commands see a rank, whether or not an agent moves its KV cache.

`observed_agent.ObservedAgent` implements it for an agent, `integrations.sglang.observe` for SGLang's own managers. The
methods run on the admin thread while other threads change the rank: they copy what they iterate over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    GatedPart,
    Integration,
    OwedParts,
    PeerRow,
    PipelineUse,
    RingUse,
    RingView,
    Role,
    RoomRow,
    StagingBuffers,
    TransferCost,
)
from kvctl_agent.telemetry.hub import Telemetry


class RankDescription(TypedDict):
    """Fields of `Status` that do not change, or rarely do; see there."""

    rank: dict[str, int]
    sizes: dict[str, int]
    registry: str | None
    transport: dict[str, str | list[str]]
    device: str
    pool: dict[str, int]
    dtypes: dict[str, str]
    integration: Integration | None
    metrics_url: str | None


class ObservedRank(Protocol):
    """A rank as the read-only admin commands see it; its rooms, events and metrics are in `telemetry`."""

    @property
    def name(self) -> str:
        """Name of the agent and of its admin socket."""

    @property
    def role(self) -> Role: ...

    @property
    def host(self) -> str:
        """Name of its host."""

    @property
    def gpu_pci(self) -> str | None:
        """PCI address of the GPU that has its pool; None if the pool is in host memory, or if it is unknown."""

    @property
    def incarnation(self) -> int: ...

    @property
    def telemetry(self) -> Telemetry: ...

    @property
    def accepting(self) -> bool:
        """Whether it accepts new rooms."""

    @property
    def draining(self) -> bool:
        """Whether it accepts no new rooms because it is draining."""

    @property
    def staging_enabled(self) -> bool: ...

    @property
    def quarantined_bytes(self) -> int | None:
        """Memory not reused because a write to it may be in flight; None if there is no such accounting."""

    @property
    def memory_gb_per_s(self) -> float | None: ...

    def describe(self) -> RankDescription: ...

    def waiting_for(self) -> str | None:
        """Returns a text that names what it waits for; None if it waits for nothing."""

    def not_ready(self) -> str | None:
        """Returns why it cannot take a new room; None if it can."""

    def config(self) -> list[ConfigRow]: ...

    def bootstrap(self) -> list[Bootstrap]: ...

    def inputs(self, since: int | None, until: int | None) -> InputPage:
        """Returns a page of recorded inputs; raises RequestRefused if none are recorded."""

    def peers(self) -> list[PeerRow]: ...

    def costs(self, tokens: int) -> tuple[int, list[TransferCost]]:
        """Returns `ahead_ns` and `costs` of the reply to `cost`, for a prompt of `tokens` tokens; empty on decode."""

    def peer_states(self) -> Sequence[str]: ...

    def complete(self, row: RoomRow) -> None:
        """Fills in what `telemetry` does not know of a room: `missing`, on a decode rank `owed`."""

    def owed_parts(self, row: RoomRow) -> list[OwedParts]: ...

    def ring_use(self) -> RingUse | None:
        """Returns size and use of a decode rank's staging ring; None without a ring."""

    def ring_view(self) -> RingView | None:
        """Returns the state of a decode rank's staging ring and of all its allocations; None without a ring."""

    def gated_parts(self) -> list[GatedPart]:
        """Returns the parts of a prefill rank that are ready but may not be sent yet; none on a decode rank."""

    def buffers(self) -> StagingBuffers | None: ...

    def pipeline(self) -> PipelineUse | None: ...
