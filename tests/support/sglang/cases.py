"""What a test asks for: the shape of the two servers, the rooms, and the content of a token's KV."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Role = Literal["prefill", "decode"]
State = Literal["swa", "mamba", "dsa"]
# When an engine aborts a room. "bootstrapping": as soon as it has it; "waiting": when decode has sent its pages, before
# the first chunk; "chunk": after the first chunk (prefill only); "transferring": later, or with all chunks sent.
Abort = Literal["bootstrapping", "waiting", "chunk", "transferring"]


@dataclass(frozen=True)
class Ranks:
    """Parallel sizes of a server. `tp` is the attention TP size of one DP group."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cp: int = 1
    dcp: int = 1
    dp_attention: bool = True  # else each DP rank is a replica with a scheduler of its own, as with --dp-size alone

    @property
    def size(self) -> int:
        return self.tp * self.dp * self.pp * self.cp


@dataclass(frozen=True)
class Place:
    """Position of one rank in its server."""

    tp: int
    dp: int
    pp: int
    cp: int

    def __str__(self) -> str:
        return f"dp{self.dp} pp{self.pp} cp{self.cp} tp{self.tp}"


def places(ranks: Ranks) -> list[Place]:
    return [
        Place(tp, dp, pp, cp)
        for dp in range(ranks.dp)
        for pp in range(ranks.pp)
        for cp in range(ranks.cp)
        for tp in range(ranks.tp)
    ]


@dataclass(frozen=True)
class Model:
    layers: int = 4
    heads: int = 4
    head_dim: int = 16
    mla: bool = False
    draft_layers: int = 0
    state: State | None = None
    window: int = 48  # tokens that SWA layers keep
    hidden: int = 32


@dataclass(frozen=True)
class Case:
    """Two servers and a backend.

    `pool_tokens` is the capacity of each rank's KV pool, unless `decode_pool_tokens` gives decode another; `rows` the
    number of metadata rows. With `layers_in_groups` prefill's forwards are passed in groups of that many layers.
    `environment` holds variables for all ranks; `prefill_environment` and `decode_environment`
    add to it.
    """

    backend: str
    prefill: Ranks = Ranks()
    decode: Ranks = Ranks()
    model: Model = Model()
    page_size: int = 16
    pool_tokens: int = 1024
    decode_pool_tokens: int | None = None
    rows: int = 8
    staging: bool = False
    layers_in_groups: int = 0
    chunked_prefill_size: int = 64
    load_balance_method: str = "follow_bootstrap_room"
    aux_sampling_mask: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    prefill_gpus: tuple[int, ...] = (0,)
    decode_gpus: tuple[int, ...] = (0,)
    environment: Mapping[str, str] = field(default_factory=dict)
    prefill_environment: Mapping[str, str] = field(default_factory=dict)
    decode_environment: Mapping[str, str] = field(default_factory=dict)

    def ranks(self, role: Role) -> Ranks:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True)
class Room:
    """A request. `chunks`: token counts after which prefill sends what it has; the rest goes with the last send.

    `prefix` tokens are in decode's radix cache already; `prefill_dp` and `decode_dp` are the DP ranks that serve it
    (`prefill_dp` None: as SGLang derives it from the room). A room that is not `opened` is unknown to decode; with
    `routed` the request carries prefill's DP rank, as from a router that chooses it; with `held` prefill never makes
    its last send. `content` off leaves out writing and comparing (benchmarks).
    The prompt has the token ids from `first_id` on; `at_decode` is its length and first id there if decode has another.
    """

    room: int
    tokens: int = 128
    chunks: tuple[int, ...] = ()
    prefix: int = 0
    prefill_dp: int | None = None
    decode_dp: int = 0
    routed: bool = False
    opened: bool = True
    held: bool = False
    abort_prefill: Abort | None = None
    abort_decode: Abort | None = None
    content: bool = True
    first_id: int = 0
    at_decode: tuple[int, int] | None = None

    @property
    def of_decode(self) -> "Room":
        return self if self.at_decode is None else replace(self, tokens=self.at_decode[0], first_id=self.at_decode[1])


@dataclass(frozen=True)
class Ended:
    """How a room ended on one rank. `wrong`: regions in which bytes differ; `started`, `ended`: time.monotonic()."""

    room: int
    state: Literal["success", "failed"]
    reason: str
    wrong: tuple[str, ...]
    started: float
    ended: float
    moved_bytes: int | None = None


def pattern(
    room: int, region: str, items: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Bytes [item, column] of a region (one layer's K, say) of a room: items are tokens, columns its bytes."""
    seed = np.uint64((zlib.crc32(region.encode()) * 2654435761 + room * 40503 + 12345) % (1 << 63))
    mixed = items.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + columns.astype(np.uint64)[
        None, :
    ] * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed += seed
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray((mixed >> np.uint64(56)).astype(np.uint8))
