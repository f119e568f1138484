"""Events that the protocol machines handle, and actions that they return.

Events are facts: a message arrived, a write completed, the engine made a call, time passed. Actions are orders that
`runtime/` executes. Both are immutable, so that they may cross threads.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import MAX_ROOM, RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol.messages import AnyMessage, Grant, Message, PeerInfo
from kvctl_agent.protocol.peer import CancelToken
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)


def check_room(number: int) -> None:
    """Raises LocalProtocolError unless the number, a room number or nonce, is an unsigned 64-bit integer."""
    if not 0 <= number <= MAX_ROOM:
        raise LocalProtocolError(f"{number} is no room number: it must fit 64 bits, unsigned")


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events. They are part of no cycle, so Python's garbage collector need not know them."""


class Received(Event, frozen=True):
    """A control message from one incarnation of a peer.

    `route` is the return address: the connection of a decode rank, or the endpoint of a prefill rank.
    """

    peer: str
    incarnation: int
    message: AnyMessage
    route: bytes = b""


class PeerConnected(Event, frozen=True):
    """The transport has connected to this peer."""

    peer: str


class PeerUnusable(Event, frozen=True):
    """The transport, or the control channel of a decode rank, cannot connect to this peer."""

    peer: str
    text: str


class Unsendable(Event, frozen=True):
    """A control message about this room to this peer can never be sent: it cannot be encoded or exceeds a frame."""

    peer: str
    room: int
    nonce: int
    text: str


class PeerDead(Event, frozen=True):
    """The process of this incarnation of a peer is proven to have ended."""

    peer: str
    incarnation: int
    text: str


class RosterKnown(Event, frozen=True):
    """Decode: all ranks of a prefill instance have registered; `names` lists them in the order of unique ranks.

    `instance` is the address of the instance's registry; `incarnations` are those of the ranks, in the same order, if
    known.
    """

    instance: str
    names: tuple[str, ...]
    incarnations: tuple[int, ...] = ()


class RosterMissing(Event, frozen=True):
    """Decode: a prefill instance is incomplete; `text` names the missing ranks."""

    instance: str
    text: str


class InstanceUnreachable(Event, frozen=True):
    """Decode: too few file descriptors are left to connect to a prefill instance now; `text` says so."""

    instance: str
    text: str


class SendRoom(Event, frozen=True):
    """Prefill engine: send() was called for this room; for `request_id` and `traceparent` see `RoomRecord`.

    `prefix_tokens`: the prefix that the engine was told in this call, since the decode ranks to which this rank
    writes had opened the room; else None. `tokens` and `digest` are those of the prompt; 0: unknown.
    """

    room: int
    request_id: str = ""
    traceparent: str = ""
    prefix_tokens: int | None = None
    tokens: int = 0
    digest: int = 0


class Prefetch(Event, frozen=True):
    """Prefill engine: the forward is about to start, so staging can be requested now.

    `groups` are the layer groups [lo, hi) that will be sent one by one; empty: all layers together. `at_ns` is the time
    of the call; 0: the time at which the event is handled. `tokens` is what the groups were chosen for: average tokens
    of a request; 0: unknown.
    """

    room: int
    groups: tuple[tuple[int, int], ...] = ()
    at_ns: int = 0
    tokens: float = 0.0


class Launched(Event, frozen=True):
    """Prefill engine: a forward was launched on the device; SendPages follows when it is done, or ForwardFailed."""

    room: int


class ForwardFailed(Event, frozen=True):
    """Prefill: a launched forward failed on the device, so no SendPages will follow for it."""

    room: int
    text: str


class SendPages(Event, frozen=True):
    """Prefill engine: the next pages of the prompt, in order from position 0, are computed.

    `layers` is the layer group [lo, hi) in which they are computed; None: all layers of this rank. `launched`: a
    Launched event was posted before for these pages. `groups` are the next pages of each KV group; -1 for a page that
    the engine does not keep.
    """

    room: int
    pages: Pages
    last: bool
    at_ns: int
    layers: tuple[int, int] | None = None
    launched: bool = False
    groups: tuple[Pages, ...] = ()


class Finish(Event, frozen=True):
    """Prefill engine: all pages were passed; the aux row and the state components are ready to be sent.

    `aux_index` is the row of this rank's aux pool, or -1; `states` has the item indices of each state component;
    `pages` are the last pages, if they were not passed before.
    """

    room: int
    aux_index: int
    at_ns: int
    states: tuple[Pages, ...] = ()
    pages: SendPages | None = None


class Recall(Event, frozen=True):
    """Engine: take the room's pages back; on a prefill rank Recalled follows, or Released if all parts are sent.

    `serial` counts the recalls of the room by the prefill engine.
    """

    room: int
    serial: int = 0


class RenewRooms(Event, frozen=True):
    """Decode engine: these rooms of a prefill instance will be opened later, so their ranks must keep them."""

    instance: str
    rooms: tuple[int, ...]


class ConnectInstance(Event, frozen=True):
    """Decode engine: connect to the ranks of the prefill instance whose registry is at this address.

    `keep`: until DisconnectInstance; otherwise it is forgotten when it is not needed any more.
    """

    instance: str
    keep: bool = True


class DisconnectInstance(Event, frozen=True):
    """Decode engine: this prefill instance has ended or was replaced, so fail its rooms and forget it."""

    instance: str


class AbortRoom(Event, frozen=True):
    """The engine or an operator aborts the room; an operator's request has a nonzero `ticket` and is answered."""

    room: int
    text: str
    ticket: int = 0


class DeclineRoom(Event, frozen=True):
    """Prefill: the engine will not send this room, which decode ranks may have opened or open later."""

    room: int
    reason: str


class ReleaseHeld(Event, frozen=True):
    """Decode operator: free one ring allocation, or all memory that a failed room keeps for lost or silent writers.

    `serial` names the allocation, `room` the room. `force`: free the memory even if a write may still land there.
    """

    ticket: int
    serial: int = 0
    room: int | None = None
    force: bool = False


class Forget(Event, frozen=True):
    """Operator: forget a peer that is gone; `force`: although memory is kept that it may still write."""

    ticket: int
    peer: str
    force: bool = False


class Drain(Event, frozen=True):
    """Operator or engine: stop accepting new rooms (`on`), or accept them again."""

    on: bool


class SetTimeouts(Event, frozen=True):
    """Operator: change the deadlines of rooms, in the state Bootstrapping and in later states."""

    bootstrap_ns: int
    waiting_ns: int


class PartSent(Event, frozen=True):
    """The transfer of a part has ended: it was written, or it was dropped because its room has failed.

    `checksum` and `row` are those in the tag, or None.
    """

    peer: str
    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    moments: dict[str, int] = {}  # end time of each stage by name, monotonic ns
    dropped: bool = False
    checksum: int | None = None
    row: bytes | None = None


class PartFailed(Event, frozen=True):
    """A part could not be written. `in_flight`: bytes may still land; PartSent(dropped) follows once none can."""

    peer: str
    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    code: str
    text: str
    in_flight: bool


class OpenRoom(Event, frozen=True):
    """Decode engine: receive this room into these pages, those of the prompt after its cached prefix.

    `prefix_pages` and `total_pages` are pages of this engine; a page of cp ranks that share a prompt counts once.
    `tokens` is the length of the prompt; 0 if its last page counts as full; `digest` that of the prompt, 0 if unknown.
    `instance` is the address of its prefill
    instance's registry; `states` has the item indices per state component, `groups` the last pages of the prompt per KV
    group. With a `refusal` the engine takes no pages, and the room fails for this reason before it is opened.
    For `request_id` and `traceparent` see `RoomRecord`.
    """

    room: int
    nonce: int
    pages: Pages
    prefix_pages: int
    total_pages: int
    aux_index: int
    instance: str
    states: tuple[Pages, ...] = ()
    prefill_only: bool = False
    tokens: int = 0
    groups: tuple[Pages, ...] = ()
    refusal: str = ""
    request_id: str = ""
    traceparent: str = ""
    digest: int = 0


class Arrived(Event, frozen=True):
    """The tag of a write arrived, so the bytes of its part are visible."""

    tag: Tag
    at_ns: int


class Scattered(Event, frozen=True):
    """A landed part was copied from its ring region to its pages."""

    serial: int
    at_ns: int


class ScatterFailed(Event, frozen=True):
    """The device failed to copy a landed part into its pages; the copy has ended and no longer reads the region."""

    serial: int
    text: str


class Checked(Event, frozen=True):
    """The checksum of a part in its pages was computed; `found` is None if that failed, as `text` says."""

    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    found: int | None
    at_ns: int
    text: str = ""


class Shutdown(Event, frozen=True):
    """This agent is closing and must send Bye to its peers. `drained`: none of its writes is in flight."""

    drained: bool


class Tick(Event, frozen=True):
    """The periodic tick: the machine checks deadlines, resends and liveness.

    `stalled_ns` is for how long before it this rank could not run: it heard no peer, and no room made progress.
    """

    stalled_ns: int = 0


class Action(msgspec.Struct, frozen=True, gc=False):
    """Base of all actions, which the garbage collector need not know either."""


class Send(Action, frozen=True):
    """Send a message to a peer: over the connection `route` if given, otherwise to the present incarnation."""

    peer: str
    message: Message
    route: bytes = b""


class ConnectPeer(Action, frozen=True):
    """Connect the transport to a decode rank; answered by PeerConnected or PeerUnusable."""

    peer: str
    incarnation: int
    info: PeerInfo
    inputs: PlanInputs


class DropPeer(Action, frozen=True):
    """Disconnect the transport from a lost peer, and reconnect the control channel to it."""

    peer: str


class ForgetPeer(Action, frozen=True):
    """Send the messages that wait for a peer, then close the control channel and the connection to the peer."""

    peer: str


class FindInstance(Action, frozen=True):
    """Look up the ranks of a prefill instance at its registry; RosterKnown follows once it is complete."""

    instance: str


class ForgetInstance(Action, frozen=True):
    """Close the connection to the registry of a prefill instance."""

    instance: str


class Transfer(Action, frozen=True):
    """Write one part to a decode rank; answered by PartSent or PartFailed.

    `src_pages` and `dst_pages` are page indices for KV, item indices for a state component, and one row for aux.
    `aux_row` is the row that is sent in the tag of a KV part; -1: none.
    """

    peer: str
    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    path: str
    share: TransferSlice | None  # None for aux
    src_pages: Pages
    dst_pages: Pages
    grant: Grant | None
    tag: bytes
    cancel: CancelToken
    ready_ns: int
    opened_ns: int  # when the part was queued
    aux_row: int = -1


class Scatter(Action, frozen=True):
    """Copy a landed part from the ring to its pages; answered by Scattered or ScatterFailed."""

    serial: int
    offset: int
    key: PartKey
    share: TransferSlice
    pages: Pages
    room: int
    nonce: int
    arrived_ns: int


class Check(Action, frozen=True):
    """Compute the checksum of a part in its pages; answered by Checked. `share` and `pages` are as in Transfer."""

    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    share: TransferSlice | None
    pages: Pages


class StoreAux(Action, frozen=True):
    """Copy an aux row that arrived in a tag to its slot, before the actions that follow."""

    slot: int
    row: bytes


class StateChanged(Action, frozen=True):
    """Set the state of a room in the engine's handle.

    `prefix_tokens`: on a prefill rank, the prompt tokens that the decode ranks to which it writes had all cached when
    they had opened the room for the first time; None before, and on decode ranks.
    """

    room: int
    state: RoomState
    failure: Failure | None = None
    prefix_tokens: int | None = None


class Overlapped(Action, frozen=True):
    """Report how the compute and the transfer of a room sent in layer groups overlapped.

    `pages`, `compute_ns` and `transfer_ns` are averages per forward. `transfer_ns` is the time during which the rank
    had a part of the room; `exposed_ns` is the portion of it after the last forward. `tokens` is what the groups were
    chosen for; 0: unknown.
    """

    tokens: float
    pages: int
    groups: int
    compute_ns: int
    transfer_ns: int
    exposed_ns: int


class Answered(Action, frozen=True):
    """Report the result of an operator's request.

    `result` is one of `contract.operations.RESULTS`, or "unknown" for an unknown room; `freed` are the serials of freed
    ring regions, `drained` the names of writers that are treated as drained because the operator used force.
    """

    ticket: int
    result: str
    text: str
    freed: tuple[int, ...] = ()
    drained: tuple[str, ...] = ()


class Recalled(Action, frozen=True):
    """Mark the pages that the prefill engine has recalled as reusable: they are not read any more.

    `serial` is that of the engine's Recall.
    """

    room: int
    serial: int


class Released(Action, frozen=True):
    """Mark the room's pages as reusable: no write from or to them is in flight any more."""

    room: int
