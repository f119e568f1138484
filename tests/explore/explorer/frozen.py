"""State machines without telemetry and time that can be frozen in one state and thawed."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, Segment
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from tests.support.protocol.invariants import RoomPlan
from tests.support.protocol.null_telemetry import NullTelemetry
from tests.support.protocol.simulation import SECOND, direct, staged

NOW_NS = SECOND  # as in a world before its first tick
# How long ago a peer was heard: lately, longer ago than the lease lasts, suspect, lost.
AGES = (0, 3, 5, 9)
TIMING = Timing(
    heartbeat_ns=0,
    suspect_ns=4,
    lost_ns=8,
    resend_ns=0,
    bootstrap_ns=1 << 60,
    waiting_ns=1 << 60,
    revoke_ns=0,
    unclaimed_ns=10,
    hold_ns=10,
)
LAPSED = 20  # longer than a room may wait to be opened or claimed
FAILURE: Failure = {"rank": "somebody", "code": "ABORTED", "at_ns": 0, "text": "for some reason"}


SILENT: Any = NullTelemetry()


class _Frozen:
    """Stores a machine's state; thawing rebuilds its parts. All failures are equal."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._given = given
        vars(self._context)["failure"] = lambda code, text: FAILURE  # type: ignore[attr-defined, index]

    def __reduce__(self) -> tuple[Any, ...]:
        local, *_ = self._given
        choose = self._given[3] if local.role == "prefill" else staged
        return machine_of, (local, choose, self.state)  # type: ignore[attr-defined]


class FrozenPrefill(_Frozen, PrefillMachine):
    pass


class FrozenDecode(_Frozen, DecodeMachine):
    pass


Machine = FrozenPrefill | FrozenDecode


def machine_of(local: LocalInfo, choose: Callable[..., str] = staged, state: Any = None) -> Machine:
    """Returns an agent's machine in its initial state or in a given state."""
    if local.role == "prefill":
        return FrozenPrefill(local, TIMING, SILENT, choose, direct, True, False, state)
    return FrozenDecode(local, TIMING, SILENT, state)


class _Shared:
    """Stores immutable values once for all states."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self._places: dict[object, int] = {}

    def keep(self, value: Any) -> tuple[Callable[[int], object], tuple[int]]:
        key: object = id(value)
        if isinstance(value, np.ndarray):
            key = value.tobytes(), value.dtype.str
        elif isinstance(value, msg.RoomOpen):  # made anew, and the same, whenever the instance is complete
            key = codec.encode(0, [value])
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.values)
            self.values.append(value)
        return _shared_at, (place,)


_shared = _Shared()


def _shared_at(place: int) -> object:
    return _shared.values[place]


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | dict.fromkeys(
        (
            np.ndarray,
            TransferSlice,
            ParallelConfig,
            ModelShape,
            Segment,
            PlanInputs,
            LocalInfo,
            Timing,
            msg.PeerInfo,
            msg.RoomOpen,
            ev.OpenRoom,
            ev.Transfer,
            RoomPlan,
        ),
        _shared.keep,
    )


def freeze(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file, -1).dump(value)
    return file.getvalue()


def thaw(frozen: bytes) -> Any:
    return pickle.loads(frozen)
