"""Which layer groups are passed when, by what SGLang's attention backend tells; without SGLang."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.integrations.sglang.layer_pipelining import count_undivided, forward_of
from kvctl_agent.layout.layer_grouping import Grouping

GROUPS = (range(4, 6), range(6, 8), range(8, 9))
PAGE = 16


class Sender:
    """What the hooks use of a sender, and what they pass to it."""

    sends = True
    groups: Any = None
    passed = curr_idx = 0

    def __init__(self, agent: Any, layer_ids: list[int] | None = None) -> None:
        self.kv_mgr = SimpleNamespace(
            agent=agent, on_gpu=False, kv_args=SimpleNamespace(kv_layer_ids=layer_ids, state_types=[])
        )
        self.received: list[Any] = []
        self.failed = ""

    def announce(self, groups: Any, tokens: float) -> None:
        self.groups, self.tokens = groups, tokens

    def pass_layers(self, group: range, start: int, pages: Any, last: bool, event: None) -> None:
        self.received.append((group, start, pages.tolist(), last))

    def fail(self, cause: str) -> None:
        self.failed = cause


class Backend:
    """An attention backend, which notes what was passed before and after each layer."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> int:
        self.layers.append(layer.layer_id)
        return int(layer.layer_id)


class Scheduler:
    """What the hooks read of SGLang's scheduler; row r of its token table has the slots 1000 r, 1000 r + 1, ..."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        self.backend = Backend()
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=self.backend))
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.server_args = SimpleNamespace()
        self.tree_cache = type("UnifiedRadixCache", (), {})()
        self.token_to_kv_pool_allocator = type("PagedTokenToKVPoolAllocator", (), {"page_size": PAGE})()
        rows = torch.arange(8)[:, None] * 1600 + torch.arange(1600)[None, :]
        self.req_to_token_pool = SimpleNamespace(req_to_token=rows.to(torch.int32))
        self.forwards: list[Any] = []
        self.agent = SimpleNamespace(layer_groups=self.layer_groups, batch=nullcontext)

    def layer_groups(self, forward: Any) -> Grouping:
        self.forwards.append(forward)
        return Grouping(GROUPS if forward.split_forward else (), "formula")

    def request(self, row: int, tokens: int, end: int, prefix: int = 0, **more: Any) -> Any:
        fields = {
            "disagg_kv_sender": Sender(self.agent),
            "origin_input_ids": [0] * tokens,
            "extend_end": end,
            "prefix_len": prefix,
            "disagg_decode_prefix_len": 0,
            "pending_bootstrap": False,
            "kv": SimpleNamespace(req_pool_idx=row),
        }
        return SimpleNamespace(**{**fields, **more})

    def forward(self, *requests: Any) -> Any:
        mode = SimpleNamespace(is_extend=lambda: True)
        return forward_of(self, SimpleNamespace(forward_mode=mode, reqs=list(requests)))

    def layer(self, number: int, **more: Any) -> None:
        assert self.backend.forward(None, None, None, SimpleNamespace(layer_id=number), None, **more) == number


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def groups(request: Any) -> list[range]:
    return [pages[0] for pages in request.disagg_kv_sender.received]


def test_a_group_is_passed_when_the_layer_after_it_begins(scheduler: Scheduler) -> None:
    request = scheduler.request(1, 40, 40)
    forward = scheduler.forward(request)
    with forward.watched():
        passed = []
        for layer in range(4, 9):
            scheduler.layer(layer)
            passed.append(len(groups(request)))
    assert passed == [0, 0, 1, 1, 3]  # the last one when the last layer has written its KV
    forward.end(None)
    assert groups(request) == list(GROUPS)
    assert {pages[1:2] + pages[3:] for pages in request.disagg_kv_sender.received} == {(0, True)}
    assert [pages[2] for pages in request.disagg_kv_sender.received] == [[100, 101, 102]] * 3
    assert request.disagg_kv_sender.passed == 3


def test_the_last_layer_that_writes_no_kv_is_passed_after_the_forward(scheduler: Scheduler) -> None:
    request = scheduler.request(1, 40, 40)
    forward = scheduler.forward(request)
    with forward.watched():
        for layer in range(4, 9):
            scheduler.layer(layer, save_kv_cache=False)
    assert len(groups(request)) == 2
    forward.end(None)
    assert len(groups(request)) == 3


@pytest.mark.parametrize("layers", [[], [5, 6, 7, 8], [4, 6, 7, 8], [8, 7, 6, 5], [0, 1, 2], [4, 4, 4]])
def test_layers_out_of_order_tell_nothing_and_all_is_passed_in_the_end(scheduler: Scheduler, layers: list[int]) -> None:
    request = scheduler.request(1, 40, 40)
    forward = scheduler.forward(request)
    with forward.watched():
        for layer in layers:
            scheduler.layer(layer)
    assert groups(request) == []
    forward.end(None)
    assert groups(request) == list(GROUPS)


def test_layers_are_counted_where_not_all_have_kv(scheduler: Scheduler) -> None:
    request = scheduler.request(1, 40, 40, disagg_kv_sender=Sender(scheduler.agent, [3, 7, 11, 15, 19, 3, 7]))
    forward = scheduler.forward(request)
    with forward.watched():
        for layer in (3, 7, 11):
            scheduler.layer(layer)
        assert groups(request) == [GROUPS[0]]


def test_chunks_end_with_whole_pages_and_a_prefix_of_decode_is_not_passed(scheduler: Scheduler) -> None:
    request = scheduler.request(2, 100, 40, disagg_decode_prefix_len=16)
    scheduler.forward(request).end(None)
    assert request.disagg_kv_sender.received[0] == (GROUPS[0], 0, [201], False)
    request.extend_end, request.prefix_len = 100, 40
    scheduler.forward(request).end(None)
    assert request.disagg_kv_sender.received[3] == (GROUPS[0], 1, [202, 203, 204, 205, 206], True)
    assert len(scheduler.forwards) == 1, "the groups of a request are chosen once"


def test_pages_that_were_sent_are_not_passed_again(scheduler: Scheduler) -> None:
    request = scheduler.request(2, 100, 64)
    request.disagg_kv_sender.curr_idx = 4
    assert scheduler.forward(request) is None
    assert request.disagg_kv_sender.groups == GROUPS


def test_requests_of_a_batch_have_their_own_pages(scheduler: Scheduler) -> None:
    requests = [scheduler.request(row, 16 * row, 16 * row) for row in (1, 2, 3)]
    scheduler.forward(*requests).end(None)
    pages = [request.disagg_kv_sender.received[0][2] for request in requests]
    assert pages == [[100], [200, 201], [300, 301, 302]]
    assert scheduler.forwards[0].tokens == (16, 32, 48)
    assert {request.disagg_kv_sender.tokens for request in requests} == {32.0}


def test_requests_without_a_room_are_left_to_sglang(scheduler: Scheduler) -> None:
    waiting = scheduler.request(1, 40, 40, pending_bootstrap=True)
    others = scheduler.request(1, 40, 40, disagg_kv_sender=SimpleNamespace())
    assert scheduler.forward(waiting, others) is None
    assert not scheduler.forwards


@pytest.mark.parametrize(
    "change",
    [
        {"tree_cache": SimpleNamespace()},
        {"token_to_kv_pool_allocator": SimpleNamespace(page_size=PAGE)},
        {"server_args": SimpleNamespace(enable_two_batch_overlap=True)},
        {"server_args": SimpleNamespace(disaggregation_enable_kv_checksum=True)},
        {"server_args": SimpleNamespace(enable_unified_cache_external_linker=True)},
    ],
)
def test_a_server_that_cannot_be_divided_says_so_once(
    scheduler: Scheduler, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    vars(scheduler).update(change)
    for _ in range(2):
        assert scheduler.forward(scheduler.request(1, 40, 40)) is None
    assert [forward.split_forward for forward in scheduler.forwards] == [False, False]
    assert caplog.text.count("layers are not pipelined on this server because of") == 1


@pytest.mark.parametrize(("state", "divided"), [("mamba", True), ("block_scale", False), ("swa", False)])
def test_state_that_is_sent_from_the_cache_of_sglang_is_not_mixed_with_kv_from_elsewhere(
    scheduler: Scheduler, state: str, divided: bool
) -> None:
    request = scheduler.request(1, 40, 40)
    request.disagg_kv_sender.kv_mgr.kv_args.state_types = [SimpleNamespace(value=state)]
    assert (scheduler.forward(request) is not None) is divided


@pytest.mark.parametrize("layer", [None, SimpleNamespace()])
def test_calls_of_the_backend_for_something_else_pass(scheduler: Scheduler, layer: Any) -> None:
    request = scheduler.request(1, 40, 40)
    forward = scheduler.forward(request)
    backend: Any = scheduler.backend
    backend.forward = lambda *args, **kwargs: 7
    with forward.watched():
        assert backend.forward(1) == 7
        assert backend.forward(1, layer=layer) == 7
    forward.end(None)
    assert (groups(request), request.disagg_kv_sender.failed) == (list(GROUPS), "")


def test_an_error_fails_the_requests_and_the_forward_goes_on(scheduler: Scheduler) -> None:
    request = scheduler.request(1, 40, 40)
    forward = scheduler.forward(request)

    def raises(*_: Any) -> None:
        raise ValueError("of a bug")

    request.disagg_kv_sender.pass_layers = raises
    with forward.watched():
        for layer in range(4, 9):
            scheduler.layer(layer)
    forward.end(None)
    assert request.disagg_kv_sender.failed == "ValueError: of a bug"
    assert scheduler.backend.layers == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("own", [False, True])
def test_the_backend_is_as_before_after_a_forward(scheduler: Scheduler, own: bool) -> None:
    if own:
        scheduler.backend.forward = scheduler.backend.forward  # type: ignore[method-assign]
    before = dict(vars(scheduler.backend))
    forward = scheduler.forward(scheduler.request(1, 40, 40))
    with forward.watched():
        assert vars(scheduler.backend) != before
    assert vars(scheduler.backend) == before


def test_pages_are_whole_numbers_of_32_bits(scheduler: Scheduler) -> None:
    request = scheduler.request(7, 40, 40)
    kept: list[Any] = []
    request.disagg_kv_sender.pass_layers = lambda group, start, pages, last, event: kept.append(pages)
    scheduler.forward(request).end(None)
    assert {pages.dtype for pages in kept} == {np.dtype(np.int32)}


def test_a_request_that_the_hooks_do_not_see_is_counted_as_undivided(scheduler: Scheduler) -> None:
    request = scheduler.request(1, 40, 40)
    count_undivided(request.disagg_kv_sender, 48)
    (forward,) = scheduler.forwards
    assert (forward.tokens, forward.split_forward) == ((48,), False)
    assert request.disagg_kv_sender.groups == ()
