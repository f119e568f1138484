"""What differs between releases of SGLang is found in each of them, by what it has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvctl_agent.integrations.sglang import releases


def test_tokens_of_a_request_in_either_form() -> None:
    new = SimpleNamespace(extend_end=48, prefix_len=16)
    old = SimpleNamespace(extend_range=SimpleNamespace(start=16, end=48), prefix_indices=[0] * 16)
    for req in (new, old):
        assert (releases.extend_end(req), releases.prefix_len(req)) == (48, 16)


def test_the_checkpoint_has_either_name() -> None:
    new = type("Scheduler", (), {"checkpoint_disagg_prefill": None})
    old = type("Scheduler", (), {"cache_unfinished_disagg_prefill": None})
    found = [releases.checkpoint_of(each) for each in (new, old, SimpleNamespace)]
    assert found == ["checkpoint_disagg_prefill", "cache_unfinished_disagg_prefill", None]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [({"dp_size": 1, "num_dp_ranks": 4}, 4), ({"dp_size": 4}, 4), ({"dp_size": 2, "num_dp_ranks": 2}, 2)],
)
def test_data_parallel_ranks_in_either_form(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], expected: int
) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(**sizes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    for package in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert releases.num_dp_ranks() == expected


def test_what_ranks_agree_on_and_what_is_sent_of_a_prefix_is_told_by_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("sglang.srt.disaggregation.utils", "sglang.srt.mem_cache.common")}
    monkeypatch.setattr(releases.importlib, "import_module", modules.__getitem__)
    assert (releases.ranks_agree_on_held_pages(), releases.sends_index_rows_of_prefix()) == (False, True)
    modules["sglang.srt.disaggregation.utils"].all_reduce_flags = None  # type: ignore[attr-defined]
    modules["sglang.srt.mem_cache.common"].suffix_page_indices = None  # type: ignore[attr-defined]
    assert (releases.ranks_agree_on_held_pages(), releases.sends_index_rows_of_prefix()) == (True, False)
