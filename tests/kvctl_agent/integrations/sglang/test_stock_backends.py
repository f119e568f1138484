"""SGLang's own backends move rooms in the harness: NIXL with its staging and without, and Mooncake."""

import dataclasses
from typing import Any

import pytest

from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair
from tests.support.sglang.runtime import STAGES_HOST_MEMORY

ROOMS = [
    Room(1, tokens=100),
    Room(2, tokens=128, chunks=(64,)),
    Room(3, tokens=112, chunks=(48, 96), prefix=32),
    Room((1 << 63) - 4, tokens=16),
]
HEADS_8 = Model(heads=8, layers=2)
CASES = {
    "tp1": Case("nixl"),
    "tp2-tp1": Case("nixl", prefill=Ranks(tp=2), model=HEADS_8),
    "tp1-tp2": Case("nixl", decode=Ranks(tp=2), model=HEADS_8),
    "tp2-tp1-staging": Case("nixl", prefill=Ranks(tp=2), model=HEADS_8, staging=True),
    "mla-tp2-tp1": Case("nixl", prefill=Ranks(tp=2), model=Model(mla=True)),
    # Pools that name their layers: stock NIXL refuses unequal PP sizes of others.
    "pp2": Case("nixl", prefill=Ranks(pp=2), model=Model(state="mamba")),
    "dp2": Case("nixl", prefill=Ranks(dp=2), decode=Ranks(dp=2)),
    "swa": Case("nixl", model=Model(state="swa")),
    "mamba": Case("nixl", model=Model(state="mamba")),
    "draft": Case("nixl", model=Model(draft_layers=1)),
    "mooncake tp2-tp1": Case("mooncake", prefill=Ranks(tp=2), model=HEADS_8),
}


@pytest.mark.parametrize("name", CASES)
def test_rooms_arrive_whole(name: str) -> None:
    if CASES[name].staging and not STAGES_HOST_MEMORY:
        pytest.skip("staging of this release of SGLang needs CUDA")
    with PDPair(CASES[name]) as pair:
        assert {rank.names["manager"].lower() for rank in pair.all()} == {f"{CASES[name].backend}kvmanager"}
        rooms = [dataclasses.replace(room, decode_dp=i % CASES[name].decode.dp) for i, room in enumerate(ROOMS)]
        pair.transfer(rooms).check()


def spoil(scheduler: Any, region: int) -> None:
    scheduler.pools.regions[region].name += " of another model"


def test_harness_sees_wrong_bytes() -> None:
    with PDPair(Case("nixl")) as pair:
        pair.call("decode", spoil, 1)
        outcome = pair.transfer([Room(5)])
        assert outcome.rooms[5]["decode dp0 pp0 cp0 tp0"].wrong == ("k1 of another model",)
        with pytest.raises(AssertionError, match="room 5 on decode"):
            outcome.check()
