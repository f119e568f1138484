"""The backend `kvctl` in SGLang's queues: each layout of the two servers that SGLang's classes allow, byte for byte."""

import dataclasses

import pytest

from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair, RankError

ROOMS = [
    Room(1, tokens=100),
    Room(2, tokens=128, chunks=(64,)),
    Room(3, tokens=112, chunks=(48, 96), prefix=32),
    Room((1 << 63) - 4, tokens=16),
]
PAGES_OF_64 = [
    Room(1, tokens=100),
    Room(2, tokens=192, chunks=(64,)),
    Room(3, tokens=256, chunks=(128,), prefix=64),
]
HEADS_8 = Model(heads=8, layers=2)
ALL_CP_RANKS = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}


TP1 = Ranks()


def kvctl(prefill: Ranks = TP1, decode: Ranks = TP1, model: Model = HEADS_8, **more: object) -> Case:
    return Case("kvctl", prefill, decode, model, **more)


def in_groups(prefill: Ranks = TP1, decode: Ranks = TP1, model: Model | None = None, **more: object) -> Case:
    """A case in which prefill's forwards are passed in groups of two layers."""
    return kvctl(
        prefill,
        decode,
        model or Model(layers=5),
        layers_in_groups=2,
        prefill_environment={"KVCTL_PIPELINE": "on", "KVCTL_PIPELINE_GROUP_SIZE": "2"},
        **more,
    )


CASES = {
    "tp1": kvctl(aux_sampling_mask=True),
    "page 1": kvctl(page_size=1, pool_tokens=512),
    "tp2-tp1 draft": kvctl(Ranks(tp=2), model=Model(heads=8, layers=2, draft_layers=1)),
    "tp1-tp2 swa": kvctl(decode=Ranks(tp=2), model=Model(heads=8, state="swa")),
    "tp2-tp1 mamba": kvctl(Ranks(tp=2), model=Model(state="mamba")),
    "tp1-tp2 mamba": kvctl(decode=Ranks(tp=2), model=Model(state="mamba")),
    "tp4-dp4": kvctl(Ranks(tp=4), Ranks(dp=4)),
    "tp4-tp1, fewer heads than ranks": kvctl(Ranks(tp=4), model=Model(heads=2)),
    "mla tp2-tp1": kvctl(Ranks(tp=2), model=Model(mla=True)),
    "mla tp1-tp2": kvctl(decode=Ranks(tp=2), model=Model(mla=True)),
    "mla tp1-tp4, decode cp 2": kvctl(
        # The variable cannot change where SGLang has the tokens.
        decode=Ranks(tp=4, dcp=2),
        model=Model(mla=True, layers=2),
        environment={"KVCTL_CP_INTERLEAVE": "4"},
    ),
    "mla tp2-tp2, decode cp 2, as nixl": dataclasses.replace(
        kvctl(Ranks(tp=2), Ranks(tp=2, dcp=2), Model(mla=True, layers=2), environment={"KVCTL_SGLANG": "replace"}),
        backend="nixl",
    ),
    "tp1, layer groups": in_groups(),
    "page 1, layer groups": in_groups(page_size=1, pool_tokens=512),
    "tp2-tp1, layer groups": in_groups(Ranks(tp=2)),
    "mla tp1-tp2, layer groups": in_groups(decode=Ranks(tp=2), model=Model(layers=5, mla=True)),
    "pp2-pp1, layer groups": in_groups(Ranks(pp=2), model=Model(layers=10)),
    "mamba, layer groups": in_groups(model=Model(layers=10, state="mamba")),
    "dsa": kvctl(model=Model(state="dsa", layers=2), page_size=64),
    "pp2-pp1 mamba": kvctl(Ranks(pp=2), model=Model(state="mamba")),
    "pp2-pp2": kvctl(Ranks(pp=2), Ranks(pp=2)),
    "dp2-dp2, any routing": kvctl(Ranks(dp=2), Ranks(dp=2), load_balance_method="round_robin"),
    "replicas": kvctl(Ranks(dp=2, dp_attention=False), Ranks(dp=2, dp_attention=False)),
    "cp2-tp2": kvctl(Ranks(cp=2), Ranks(tp=2)),
    "cp2-tp2 mla, all cp ranks send": kvctl(
        Ranks(cp=2), Ranks(tp=2), Model(mla=True, layers=2), environment=ALL_CP_RANKS
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if number % 6 else pytest.mark.sample) for number, name in enumerate(CASES)]
)
def test_rooms_arrive_whole(name: str) -> None:
    case = CASES[name]
    chosen = case.prefill.dp > 1  # by the router: two rooms to one rank, two to the other
    rooms = [
        dataclasses.replace(
            room,
            prefill_dp=i // 2 if chosen else None,
            decode_dp=i % case.decode.dp,
            routed=not case.prefill.dp_attention,
        )
        for i, room in enumerate(PAGES_OF_64 if case.page_size == 64 else ROOMS)
    ]
    with PDPair(case) as pair:
        assert {rank.names["manager"] for rank in pair.all()} == {"KvctlKVManager"}
        pair.transfer(rooms).check()


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (kvctl(decode=Ranks(tp=2, dcp=2)), r"decode context parallelism \(--dcp-size\) of a model with KV heads"),
        (kvctl(staging=True), "SGLANG_DISAGG_STAGING_BUFFER"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case: Case, named: str) -> None:
    with pytest.raises(RankError, match=f"does not support {named}"), PDPair(case):
        pass
