"""The scheduler's half: the blocks that each step passes, and what requests and their parameters become."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.integrations.sglang import prompt_digests
from kvctl_agent.request_id import prompt_digest, room_number
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.modules import metadata, scheduler
from tests.support.vllm.server import Model

REGISTRY, PREFILL = "tcp://127.0.0.1:14579", "tcp://10.0.0.5:14579"
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "7f3a"}
FROM_PREFILL = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "7f3a", "kvctl_prefill": PREFILL}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BLOCK = 16
DIGEST = prompt_digest(range(40))
PLAIN = Model()
HYBRID = Model(groups=(((0,), None), ((1,), 32)))
Tables = dict[str, tuple[list[int], ...]]


def half(model: Model = PLAIN, dcp: int = 1) -> Any:
    return scheduler.ConnectorScheduler(REGISTRY, model.config(1), dcp)


def request(params: Mapping[str, Any] | None, tokens: int = 40, name: str = "r") -> vllm.Request:
    return vllm.Request(name, tokens, None if params is None else dict(params))


def output(
    tables: Tables,
    new: Mapping[str, tuple[int, int]] | None = None,
    cached: Mapping[str, tuple[int, int]] | None = None,
    preempted: Iterable[str] = (),
) -> vllm.SchedulerOutput:
    """A step that computes tokens [computed, computed + count) of requests."""
    new, cached = new or {}, cached or {}
    return vllm.SchedulerOutput(
        [vllm.NewRequestData(name, None, [], None, None, tables[name], at, None) for name, (at, _) in new.items()],
        vllm.CachedRequestData(
            list(cached), set(), [], {}, [None] * len(cached), [at for at, _ in cached.values()], []
        ),
        {name: count for name, (_, count) in {**new, **cached}.items()},
        0,
        {},
        {},
        set(),
        [],
        preempted_req_ids=set(preempted),
        kv_connector_block_state=vllm.KVConnectorBlockState({*new, *cached}, tables.__getitem__, {}),
    )


def idle() -> vllm.SchedulerOutput:
    return output({})


def passed(meta: Any) -> list[tuple[Any, ...]]:
    return [(each.request, *each.blocks, each.tokens, each.last) for each in meta.computed]


def allocate(decode: Any, wanted: vllm.Request, cached: int, *table: list[int]) -> Any:
    """Has a request's blocks allocated; returns what the workers are told."""
    count, _ = decode.matched_tokens(wanted, cached)
    decode.allocated(wanted, vllm.KVCacheBlocks(table), count)
    return decode.step(idle())


class TestPrefill:
    def test_a_room_begins_when_its_request_arrives(self) -> None:
        prefill = half()
        prefill.on_new_request(request({**TO_DECODE, "traceparent": TRACE}))
        assert prefill.pending
        assert prefill.step(idle()).sends == [("r", "7f3a", TRACE, 40, DIGEST)]
        assert not prefill.pending

    def test_the_trace_context_of_its_headers_is_taken_too(self) -> None:
        prefill = half()
        traced = request(TO_DECODE)
        traced.trace_headers = {"traceparent": TRACE}
        prefill.on_new_request(traced)
        meta = prefill.step(output({"r": ([5, 6, 7],)}, {"r": (0, 40)}))
        assert meta.sends == [("r", "7f3a", TRACE, 40, DIGEST)]
        traced.status = vllm.RequestStatus.FINISHED_STOPPED
        assert prefill.finished(traced)[1]["traceparent"] == TRACE

    def test_without_a_transfer_id_the_request_names_the_room(self) -> None:
        prefill = half()
        prefill.on_new_request(request({"do_remote_decode": True, "transfer_id": True}, name="cmpl-1"))
        assert prefill.step(idle()).sends == [("cmpl-1", "cmpl-1", "", 40, DIGEST)]

    def test_a_transfer_id_may_be_the_number_of_a_room(self) -> None:
        prefill = half()
        prefill.on_new_request(request({"do_remote_decode": True, "transfer_id": 0}, name="cmpl-1"))
        [send] = prefill.step(idle()).sends
        assert metadata.room_of(send.transfer) == 0
        assert metadata.room_of("7") == room_number("7")

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"transfer_id": "7f3a"}])
    def test_other_requests_are_left_alone(self, params: dict[str, Any] | None) -> None:
        prefill = half()
        plain = request(params)
        prefill.on_new_request(plain)
        assert not prefill.pending
        assert prefill.matched_tokens(plain, 0) == (0, False)
        prefill.allocated(plain, vllm.KVCacheBlocks(([1, 2, 3],)), 0)
        assert passed(prefill.step(output({"r": ([1, 2, 3],)}, {"r": (0, 40)}))) == []
        assert prefill.finished(plain) == (False, None)
        assert not prefill.pending

    def test_decoding_after_the_prompt_passes_nothing(self) -> None:
        prefill = half()
        prefill.on_new_request(request(TO_DECODE))
        prefill.step(output({"r": ([5, 6, 7],)}, {"r": (0, 40)}))
        assert passed(prefill.step(output({"r": ([5, 6, 7],)}, cached={"r": (40, 1)}))) == []

    def test_a_cached_prefix_is_passed_before_the_first_step_computes(self) -> None:
        prefill = half()
        prefill.on_new_request(request(TO_DECODE))
        meta = prefill.step(output({"r": ([5, 6, 7],)}, {"r": (32, 8)}))
        assert meta.cached == [("r", ([5, 6],))]
        assert passed(meta) == [("r", [7], 8, True)]

    def test_cached_blocks_that_the_step_computes_for_another_request_are_passed_after_it(self) -> None:
        prefill = half()
        for name in ("r", "s"):
            prefill.on_new_request(request(TO_DECODE, name=name))
        meta = prefill.step(output({"r": ([5, 6, 7],), "s": ([5, 6, 8],)}, {"r": (16, 24), "s": (32, 8)}))
        assert meta.cached == [("r", ([5],)), ("s", ([5],))]
        assert passed(meta) == [("r", [6, 7], 24, True), ("s", [6, 8], 8, True)]

    def test_cached_blocks_are_passed_after_a_step_that_copies_blocks(self) -> None:
        prefill = half()
        prefill.on_new_request(request(TO_DECODE))
        step = output({"r": ([5, 6, 7],)}, {"r": (32, 8)})
        step.kv_cache_block_copies = [(3, 6)]
        meta = prefill.step(step)
        assert meta.cached == []
        assert passed(meta) == [("r", [5, 6, 7], 8, True)]

    def test_blocks_outside_a_window_are_absent(self) -> None:
        prefill = half(HYBRID)
        prefill.on_new_request(request(TO_DECODE, tokens=70))
        tables: Tables = {"r": ([5, 6, 7], [8, 9, 10])}
        assert passed(prefill.step(output(tables, {"r": (0, 48)}))) == [("r", [5, 6, 7], [8, 9, 10], 48, False)]
        tables["r"] = ([5, 6, 7, 11, 12], [0, 0, 10, 13, 14])
        meta = prefill.step(output(tables, cached={"r": (48, 22)}))
        assert passed(meta) == [("r", [11, 12], [13, 14], 22, True)]

    def test_a_cached_prefix_outside_a_window_is_absent(self) -> None:
        prefill = half(HYBRID)
        prefill.on_new_request(request(TO_DECODE, tokens=70))
        meta = prefill.step(output({"r": ([5, 6, 7, 8, 9], [0, 0, 7, 10, 11])}, {"r": (64, 6)}))
        assert meta.cached == [("r", ([5, 6, 7, 8], [-1, -1, 7, 10]))]
        assert passed(meta) == [("r", [9], [11], 6, True)]

    @pytest.mark.parametrize("status", [vllm.RequestStatus.FINISHED_STOPPED, vllm.RequestStatus.FINISHED_LENGTH_CAPPED])
    def test_a_finished_request_keeps_its_blocks_and_tells_decode_where_they_are(
        self, status: vllm.RequestStatus
    ) -> None:
        prefill = half()
        done = request(TO_DECODE)
        prefill.on_new_request(done)
        prefill.step(output({"r": ([5, 6, 7],)}, {"r": (0, 40)}))
        done.status = status
        assert prefill.finished(done) == (
            True,
            {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "7f3a", "kvctl_prefill": REGISTRY},
        )
        assert not prefill.pending
        assert prefill.finished(done) == (False, None)

    @pytest.mark.parametrize("computed", [None, 16, 40])
    @pytest.mark.parametrize("status", [vllm.RequestStatus.FINISHED_ABORTED, vllm.RequestStatus.FINISHED_ERROR])
    def test_an_aborted_request_keeps_its_blocks_until_they_are_not_read(
        self, computed: int | None, status: vllm.RequestStatus
    ) -> None:
        prefill = half()
        gone = request(TO_DECODE)
        prefill.on_new_request(gone)
        if computed is not None:
            prefill.step(output({"r": ([5, 6, 7],)}, {"r": (0, computed)}))
        gone.status = status
        assert prefill.finished(gone) == (True, None)
        assert prefill.pending
        assert [name for name, _ in prefill.step(idle()).aborted] == ["r"]

    def test_a_request_that_stops_before_its_prompt_is_computed_is_aborted(self) -> None:
        prefill = half()
        gone = request(TO_DECODE)
        prefill.on_new_request(gone)
        prefill.step(output({"r": ([5],)}, {"r": (0, 16)}))
        gone.status = vllm.RequestStatus.FINISHED_STOPPED
        assert prefill.finished(gone) == (True, None)
        ((name, reason),) = prefill.step(idle()).aborted
        assert (name, reason) == ("r", "the request ended at the prefill engine before its prompt was computed")


class TestDigests:
    """What determines the KV of a prompt, as both servers have it."""

    CHANGES: ClassVar[dict[str, Any]] = {
        "prompt_token_ids": [1, *range(39)],
        "lora_request": SimpleNamespace(lora_name="a"),
        "cache_salt": "a",
        "mm_features": [SimpleNamespace(identifier="a")],
    }

    @pytest.mark.parametrize("change", CHANGES)
    def test_what_determines_the_kv_is_part_of_it(self, change: str) -> None:
        changed = request(TO_DECODE)
        setattr(changed, change, self.CHANGES[change])
        digest = metadata.digest_of(changed, 40, True)
        assert digest not in (None, DIGEST)
        assert digest == metadata.digest_of(changed, 40, True)

    @pytest.mark.parametrize("unknown", [{"prompt_embeds": [[1.0]]}, {"prompt_token_ids": None}])
    def test_it_is_unknown_without_token_ids(self, unknown: dict[str, Any]) -> None:
        changed = request(TO_DECODE)
        for name, value in unknown.items():
            setattr(changed, name, value)
        assert metadata.digest_of(changed, 40, True) is None

    @pytest.mark.parametrize("broken", [{"cache_salt": 7}, {"prompt_token_ids": [1 << 64] * 40}])
    def test_what_no_digest_can_be_computed_of_costs_the_engine_nothing(self, broken: dict[str, Any]) -> None:
        changed = request(TO_DECODE)
        for name, value in broken.items():
            setattr(changed, name, value)
        assert metadata.digest_of(changed, 40, True) is None

    def test_inputs_that_are_named_by_the_request_make_it_unknown(self) -> None:
        changed = request(TO_DECODE)
        changed.mm_features = self.CHANGES["mm_features"]
        prefill = scheduler.ConnectorScheduler(REGISTRY, PLAIN.config(1), 1, media_hashed=False)
        prefill.on_new_request(changed)
        assert [send.digest for send in prefill.step(idle()).sends] == [None]

    @pytest.mark.parametrize("model", [PLAIN, HYBRID])
    def test_both_servers_have_the_same(self, model: Model) -> None:
        """Of a model with windows both leave the last token out, which decode computes."""
        prefill, decode = half(model), half(model)
        prefill.on_new_request(request(TO_DECODE))
        [send] = prefill.step(idle()).sends
        wanted = request(FROM_PREFILL)
        decode.on_new_request(wanted)
        [receive] = allocate(decode, wanted, 0, [5, 6, 7], [8, 9, 10]).receives
        assert (send.tokens, send.digest) == (receive.tokens, receive.digest)

    def test_sglang_has_the_same(self) -> None:
        salted = request(TO_DECODE)
        salted.cache_salt, salted.lora_request = "tenant", SimpleNamespace(lora_name="a")
        runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs={"7": SimpleNamespace(lora_name="a")}))
        server = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
        theirs: dict[str, Any] = {"origin_input_ids": array("q", range(38)), "output_ids": array("q", range(38, 45))}
        theirs |= {"rid": "r", "lora_id": "7", "cache_salt": "tenant", "multimodal_inputs": None, "input_embeds": None}
        found = prompt_digests.prompt_of(server, SimpleNamespace(**theirs), 40)
        assert found == (40, metadata.digest_of(salted, 40, True), "r", "")
        for unknown in ({"lora_id": "8"}, {"multimodal_inputs": object()}, {"input_embeds": [[0.5]]}):
            assert prompt_digests.prompt_of(server, SimpleNamespace(**theirs | unknown), 40) == (40, None, "r", "")


class TestDecode:
    def test_all_of_a_prompt_is_received(self) -> None:
        decode = half()
        wanted = request({**FROM_PREFILL, "traceparent": TRACE})
        decode.on_new_request(wanted)
        assert decode.matched_tokens(wanted, 0) == (40, True)
        meta = allocate(decode, wanted, 0, [5, 6, 7])
        assert meta.receives == [("r", "7f3a", PREFILL, TRACE, ([5, 6, 7],), 0, 40, DIGEST)]

    def test_a_cached_prefix_is_not_received(self) -> None:
        decode = half()
        wanted = request(FROM_PREFILL)
        decode.on_new_request(wanted)
        assert decode.matched_tokens(wanted, 16) == (24, True)
        meta = allocate(decode, wanted, 16, [5, 6, 7])
        assert meta.receives == [("r", "7f3a", PREFILL, "", ([6, 7],), 16, 40, DIGEST)]

    def test_a_prompt_that_is_cached_is_refused_at_prefill(self) -> None:
        decode = half()
        wanted = request(FROM_PREFILL, tokens=32)
        decode.on_new_request(wanted)
        assert decode.matched_tokens(wanted, 32) == (0, False)
        meta = allocate(decode, wanted, 32, [5, 6])
        assert meta.receives == []
        assert meta.refused == [("7f3a", PREFILL, "the decode engine has cached the prompt, or computes it itself")]

    @pytest.mark.parametrize(
        ("tokens", "table", "blocks"),
        [
            (70, [0, 0, 7, 8, 9], [7, 8, 9]),
            (79, [0, 0, 0, 8, 9], [8, 9]),  # the window of the next token begins with a block
            (20, [5, 6], [5, 6]),
        ],
    )
    def test_the_blocks_of_a_window_are_received(self, tokens: int, table: list[int], blocks: list[int]) -> None:
        decode = half(HYBRID)
        wanted = request(FROM_PREFILL, tokens=tokens)
        decode.on_new_request(wanted)
        full = list(range(20, 20 + len(table)))
        (receive,) = allocate(decode, wanted, 0, full, table).receives
        assert receive.blocks == (full, blocks)

    def test_a_cached_prefix_in_a_window_is_not_received(self) -> None:
        decode = half(HYBRID)
        wanted = request(FROM_PREFILL, tokens=70)
        decode.on_new_request(wanted)
        (receive,) = allocate(decode, wanted, 48, [1, 2, 3, 4, 5], [0, 0, 7, 8, 9]).receives
        assert receive.blocks == ([4, 5], [8, 9])

    def test_blocks_of_context_parallel_ranks_have_more_tokens(self) -> None:
        decode = half(dcp=2)
        wanted = request(FROM_PREFILL, tokens=70)
        decode.on_new_request(wanted)
        (receive,) = allocate(decode, wanted, 32, [1, 2, 3]).receives
        assert receive.blocks == ([2, 3],)

    def test_it_is_received_once(self) -> None:
        decode = half()
        wanted = request(FROM_PREFILL)
        decode.on_new_request(wanted)
        allocate(decode, wanted, 0, [5, 6, 7])
        decode.received({"r"})
        assert decode.matched_tokens(wanted, 0) == (0, False)  # after a preemption, or a failure that is recomputed
        assert allocate(decode, wanted, 0, [5, 6, 7]).receives == []
        assert decode.finished(wanted) == (False, None)
        assert not decode.pending

    @pytest.mark.parametrize(
        ("name", "value"),
        [(name, value) for name in ("transfer_id", "kvctl_prefill") for value in (None, 7.0, "")]
        + [("transfer_id", value) for value in (True, -1, 1 << 64, "x" * 1025, "\ud800")],
    )
    def test_without_a_room_or_a_server_it_is_computed_here(
        self, name: str, value: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        decode = half()
        wanted = request({**FROM_PREFILL, name: value})
        decode.on_new_request(wanted)
        assert decode.matched_tokens(wanted, 0) == (0, False)
        assert "has do_remote_prefill but no transfer_id and text kvctl_prefill" in caplog.text

    def test_a_request_that_ends_before_it_has_blocks_is_refused_at_prefill(self) -> None:
        decode = half()
        gone = request(FROM_PREFILL)
        decode.on_new_request(gone)
        assert decode.finished(gone) == (False, None)
        assert decode.pending
        meta = decode.step(idle())
        assert meta.refused == [("7f3a", PREFILL, "the request ended before the decode engine had blocks")]
        assert meta.expected == {}

    def test_a_request_that_ends_before_its_kv_is_there_is_aborted(self) -> None:
        decode = half()
        gone = request(FROM_PREFILL)
        decode.on_new_request(gone)
        allocate(decode, gone, 0, [5, 6, 7])
        assert decode.finished(gone) == (False, None)
        assert decode.step(idle()).aborted == [("r", "the request ended at the decode engine")]

    def test_a_request_that_ends_after_its_kv_is_there_needs_nothing(self) -> None:
        decode = half()
        wanted = request(FROM_PREFILL)
        decode.on_new_request(wanted)
        allocate(decode, wanted, 0, [5, 6, 7])
        decode.received({"r"})
        assert decode.finished(wanted) == (False, None)
        assert not decode.pending

    def test_requests_that_wait_are_renewed_every_five_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        decode = half()
        for name, prefill in (("a", PREFILL), ("b", PREFILL), ("c", REGISTRY)):
            decode.on_new_request(
                request({**FROM_PREFILL, "transfer_id": f"t-{name}", "kvctl_prefill": prefill}, 40, name)
            )
        every = {PREFILL: ["t-a", "t-b"], REGISTRY: ["t-c"]}
        assert decode.step(idle()).expected == every
        now += 4.9
        assert decode.step(idle()).expected == {}
        now += 0.1
        assert decode.step(idle()).expected == every
        decode.on_new_request(request({**FROM_PREFILL, "transfer_id": "t-d"}, 40, "d"))
        assert decode.step(idle()).expected == {PREFILL: ["t-a", "t-b", "t-d"], REGISTRY: ["t-c"]}
        now += 5
        opened = request({**FROM_PREFILL, "transfer_id": "t-a"}, 40, "a")
        assert PREFILL in allocate(decode, opened, 0, [5, 6, 7]).expected
        assert "t-a" not in decode.step(idle()).expected.get(PREFILL, [])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """A prompt's tokens, and for each attempt to compute it the cached tokens and the tokens of each step."""
    tokens = draw(st.integers(1, 200))
    attempts = []
    for last in [False] * draw(st.integers(0, 3)) + [True]:
        cached = draw(st.integers(0, (tokens - 1) // BLOCK)) * BLOCK
        steps, at = [], cached
        while at < tokens and (last or not steps or draw(st.booleans())):
            steps.append(draw(st.integers(1, tokens - at)))
            at += steps[-1]
        attempts.append((cached, steps))
    return tokens, attempts


@given(schedules(), st.integers(0, 100))
def test_each_attempt_passes_each_block_of_the_prompt_once(
    schedule: tuple[int, list[tuple[int, list[int]]]], window: int
) -> None:
    tokens, attempts = schedule
    model = Model(groups=(((0,), None), ((1,), window + 1)))
    prefill = half(model)
    prefill.on_new_request(request(TO_DECODE, tokens + 1))  # decode computes the last token
    count = -(-tokens // BLOCK)
    for number, (cached, steps) in enumerate(attempts):
        full = [100 * number + block for block in range(1, count + 1)]
        found: list[int] = []
        at, last = cached, False
        for place, size in enumerate(steps):
            gone = max(0, at - window) // BLOCK
            windowed = [0] * gone + [block + 50 for block in full[gone:]]
            scheduled = {"r": (at, size)}
            first = number == place == 0
            meta = prefill.step(
                output(
                    {"r": (full[: -(-(at + size) // BLOCK)], windowed[: -(-(at + size) // BLOCK)])},
                    new=scheduled if first else None,
                    cached=None if first else scheduled,
                    preempted=["r"] if number and not place else [],
                )
            )
            assert meta.preempted == (["r"] if number and not place else [])
            at += size
            ((_, blocks, others, computed, last),) = passed(meta)
            assert computed == size
            assert last == (at == tokens)
            before, complete = len(found), count if last else at // BLOCK
            (early, others_early) = meta.cached[0][1] if meta.cached else ([], [])
            assert early == (full[: cached // BLOCK] if place == 0 else [])
            found += early + blocks
            assert found == full[:complete]
            assert others_early + others == [block or -1 for block in windowed[before:complete]]
        assert last or at < tokens
