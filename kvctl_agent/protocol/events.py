"""What goes into the machines and what comes out; nothing else does.

Events are facts (a message came, a write completed, the engine called us, time passed); actions are orders that
`runtime/` carries out. Both are immutable, so they may cross threads and be recorded.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.protocol.messages import AnyMessage, Grant, Message, PeerInfo
from kvctl_agent.protocol.peer import CancelToken
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag

Pages = npt.NDArray[np.int32]


def check_room(number: int) -> None:
    """Raises LocalProtocolError for what is no room number (or nonce): those are unsigned and have 64 bits."""
    if not 0 <= number < 1 << 64:
        raise LocalProtocolError(f"{number} is no room number: it must fit 64 bits, unsigned")


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class Received(Event, frozen=True):
    """A control message from the peer called `peer`, in its life `incarnation`.

    `route` is the return address: of a decode rank's connection, or a prefill rank's endpoint.
    """

    peer: str
    incarnation: int
    message: AnyMessage
    route: bytes = b""


class PeerConnected(Event, frozen=True):
    """The transport can write to this peer."""

    peer: str


class PeerUnusable(Event, frozen=True):
    """The transport refused this peer."""

    peer: str
    text: str


class Unsendable(Event, frozen=True):
    """A control message of this room to this peer can never be sent: it cannot be encoded, or no frame can hold it."""

    peer: str
    room: int
    nonce: int
    text: str


class PeerDead(Event, frozen=True):
    """Proof, not suspicion: that process has ended."""

    peer: str
    incarnation: int
    text: str


class RosterKnown(Event, frozen=True):
    """Decode: a prefill instance is complete; these are its rank names, in the order of unique ranks.

    `instance` is where its registry is; `incarnations` are those that are registered, where that is known.
    """

    instance: str
    names: tuple[str, ...]
    incarnations: tuple[int, ...] = ()


class RosterMissing(Event, frozen=True):
    """Decode: what the registry of an instance that is not complete says is missing."""

    instance: str
    text: str


class SendRoom(Event, frozen=True):
    """Prefill engine: this room will be sent from here."""

    room: int


class Prefetch(Event, frozen=True):
    """Prefill engine: its forward is about to start, ask for staging now.

    `groups` are the layer groups [lo, hi) that will be sent one by one; empty: all layers at once.
    """

    room: int
    groups: tuple[tuple[int, int], ...] = ()
    at_ns: int = 0


class Launched(Event, frozen=True):
    """Prefill engine: a forward runs on the device; SendPages follows when it is done, or ForwardFailed."""

    room: int


class ForwardFailed(Event, frozen=True):
    """Prefill: the device failed the forward that was launched, so that no pages of it will come."""

    room: int
    text: str


class SendPages(Event, frozen=True):
    """Prefill engine: the next pages of the prompt, in order from position 0, are computed.

    `layers` is the layer group [lo, hi) they are computed in; None: all layers of this rank. `launched`: it was told
    before, by Launched, that they would be.
    """

    room: int
    pages: Pages
    last: bool
    at_ns: int
    layers: tuple[int, int] | None = None
    launched: bool = False


class Finish(Event, frozen=True):
    """Prefill engine: nothing follows but the aux row and, for each state component, these items."""

    room: int
    aux_index: int
    at_ns: int
    states: tuple[Pages, ...] = ()


class AbortRoom(Event, frozen=True):
    """Either engine gives the room up, or an operator does, who wants an answer (`ticket`)."""

    room: int
    text: str
    ticket: int = 0


class ReleaseHeld(Event, frozen=True):
    """Decode operator: free one allocation of the ring, or all that a failed room holds for writers that are gone.

    `force`: also where nothing proves that no write can land there any more.
    """

    ticket: int
    serial: int = 0
    room: int | None = None
    force: bool = False


class Drain(Event, frozen=True):
    """Operator or engine: take no new rooms from now on, or take them again."""

    on: bool


class SetTimeouts(Event, frozen=True):
    """Operator: rooms may wait so long from now on."""

    bootstrap_ns: int
    waiting_ns: int


class PartSent(Event, frozen=True):
    """A transfer worker is done with a part: written, with the checksum that its tag has, or dropped as cancelled."""

    peer: str
    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    moments: dict[str, int] = {}  # stage → when it ended, monotonic ns
    dropped: bool = False
    checksum: int | None = None


class PartFailed(Event, frozen=True):
    """The engine failed a part. `in_flight`: bytes may still land; PartSent(dropped) follows when none can."""

    peer: str
    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    code: str
    text: str
    in_flight: bool


class OpenRoom(Event, frozen=True):
    """Decode engine: receive this room into these pages (positions prefix_pages..total_pages).

    `instance` is where the registry of its prefill instance is; `states` has the item indices of each state component.
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


class Arrived(Event, frozen=True):
    """A tag arrived: that part's bytes are visible."""

    tag: Tag
    at_ns: int


class Scattered(Event, frozen=True):
    """A landed part is in its pages."""

    serial: int
    at_ns: int


class ScatterFailed(Event, frozen=True):
    """A landed part is not in its pages, and nothing copies it any more: the device failed."""

    serial: int
    text: str


class Checked(Event, frozen=True):
    """A part in its pages was compared with its checksum; `found` is that of its bytes, None where they are on
    a device and were not read."""

    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    found: int | None
    at_ns: int


class Shutdown(Event, frozen=True):
    """This agent is closing: nobody need wait for its silence. `drained`: no write of ours is in flight."""

    drained: bool


class Tick(Event, frozen=True):
    """Time passed."""


class Action(msgspec.Struct, frozen=True):
    """Base of all actions."""


class Send(Action, frozen=True):
    """Send a message to a peer; with `route` over that connection, although it is not the one of the peer's life."""

    peer: str
    message: Message
    route: bytes = b""


class ConnectPeer(Action, frozen=True):
    """Make the peer, which holds `held` of the model, writable; answered by PeerConnected or PeerUnusable."""

    peer: str
    incarnation: int
    who: PeerInfo
    held: tuple[LocalShard, ...]


class DropPeer(Action, frozen=True):
    """Forget the transport's side of a peer."""

    peer: str


class ForgetPeer(Action, frozen=True):
    """Nothing will be said to this peer again: its instance has no such rank any more."""

    peer: str


class FindInstance(Action, frozen=True):
    """Ask this registry for the ranks of its prefill instance; once it is complete, RosterKnown answers, each time."""

    instance: str


class Transfer(Action, frozen=True):
    """Move one part; answered by PartSent or PartFailed. Of a state the pages are items, of aux one row."""

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
    opened_ns: int  # when the last gate opened and it went to the worker


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
    """Take the checksum of a part that is in its pages; answered by Checked. Pages and share are as in Transfer."""

    room: int
    nonce: int
    kind: PartKind
    key: PartKey
    share: TransferSlice | None
    pages: Pages


class StateChanged(Action, frozen=True):
    """Tell the engine's handle."""

    room: int
    state: RoomState
    failure: Failure | None = None


class Overlapped(Action, frozen=True):
    """A room whose layers went in groups is sent: how its compute and its transfer overlapped, per forward.

    `transfer_ns` is the time in which some part was with a worker, `exposed_ns` what was left after the last forward.
    """

    pages: int
    groups: int
    compute_ns: int
    transfer_ns: int
    exposed_ns: int


class Answered(Action, frozen=True):
    """What an operator's request led to.

    `result` is one of `contract.operations.RESULTS`, or "unknown" for a room that is not here; `freed` are the serials
    that were freed, `drained` the writers that are taken for gone, at once and for the operator's word alone.
    """

    ticket: int
    result: str
    text: str
    freed: tuple[int, ...] = ()
    drained: tuple[str, ...] = ()


class Released(Action, frozen=True):
    """The room's pages may be reused: nothing of it is in flight any more."""

    room: int
