"""SGLang's own KV pools in one rank's memory, with the content that prefill writes and decode compares."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tests.support.sglang.cases import Case, Place, Role, pattern

UNTOUCHED = 0xA5  # what decode's pools hold where nothing was received
Rows = dict[str, npt.NDArray[np.int64]]
Addressing = Literal["token", "window", "slot", "page"]


@dataclass
class Region:
    """Memory of one layer's tensor, as bytes [row, column]. `columns` number its bytes in the whole model."""

    name: str
    memory: torch.Tensor
    columns: npt.NDArray[np.int64]
    addressing: Addressing

    def write(self, room: int, items: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        content = torch.from_numpy(pattern(room, self.name, items, self.columns))
        self.memory[torch.from_numpy(rows)] = content.to(self.memory.device)

    def holds(self, room: int, items: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> bool:
        found = self.memory[torch.from_numpy(rows)].cpu().numpy()
        return bool(np.array_equal(found, pattern(room, self.name, items, self.columns)))


def byte_columns(units: npt.NDArray[np.int64], unit_bytes: int) -> npt.NDArray[np.int64]:
    return (units[:, None] * unit_bytes + np.arange(unit_bytes)).ravel()


class Pools:
    """KV pool, draft pool and state of a rank, and what allocates their pages and rows.

    It is what SGLang's queues call req_to_token_pool and token_to_kv_pool_allocator. Page 0 and row 0 are padding.
    """

    def __init__(self, case: Case, role: Role, place: Place, device: str) -> None:
        from sglang.srt.mem_cache.memory_pool import (
            DSATokenToKVPool,
            HybridLinearKVPool,
            MambaPool,
            MHATokenToKVPool,
            MLATokenToKVPool,
        )
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        model, ranks = case.model, case.ranks(role)
        self.case, self.role, self.place = case, role, place
        # Under decode context parallelism a page number stands for a page on each of the ranks that share a prompt.
        self.dcp, self.dcp_rank = ranks.dcp, place.tp % ranks.dcp
        self.page_size = case.page_size * self.dcp
        self.heads = max(1, model.heads // ranks.tp)
        first_head = place.tp * model.heads // ranks.tp
        self.size = (role == "decode" and case.decode_pool_tokens) or case.pool_tokens
        per_stage = model.layers // ranks.pp
        self.layers = list(range(place.pp * per_stage, (place.pp + 1) * per_stage))
        self.regions: list[Region] = []
        self.draft: Any = None
        self.state_slots = case.rows * 2 + 1
        common = {"page_size": case.page_size, "dtype": torch.bfloat16, "device": device, "enable_memory_saver": False}
        span = {"start_layer": self.layers[0], "end_layer": self.layers[-1]}
        heads = {"head_num": self.heads, "head_dim": model.head_dim}
        columns = byte_columns(np.arange(first_head, first_head + self.heads), model.head_dim * 2)

        def mha(pool: Any, names: list[int], addressing: Addressing, prefix: str = "") -> None:
            for kind, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
                for layer, tensor in zip(names, buffers, strict=True):
                    self._region(f"{prefix}{kind}{layer}", tensor, columns, addressing)

        def mla(pool: Any, names: list[int]) -> None:
            for layer, tensor in zip(names, pool.kv_buffer, strict=True):
                self._region(f"kv{layer}", tensor, None, "token")

        if model.state == "swa":
            full, sliding = self.layers[::2], self.layers[1::2]
            self.kv: Any = SWAKVPool(
                size=self.size,
                size_swa=self.size,
                swa_attention_layer_ids=sliding,
                full_attention_layer_ids=full,
                **common,
                **heads,
            )
            mha(self.kv.full_kv_pool, full, "token")
            mha(self.kv.swa_kv_pool, sliding, "window")
        elif model.state == "mamba":
            full, linear = self.layers[::2], self.layers[1::2]
            # Sizes of query, key and value channels of the convolution, of which each rank holds a slice.
            groups, inner = [8, 8, 16], 3
            parameters = SimpleNamespace(
                shape=SimpleNamespace(
                    conv=[(sum(groups) // ranks.tp, inner)],
                    temporal=(8 // ranks.tp, 4, 4),
                    conv_shard_groups=groups,
                ),
                dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
                is_kda=False,
            )
            state = MambaPool(
                size=self.state_slots,
                spec_state_size=0,
                cache_params=parameters,
                mamba_layer_ids=linear,
                device=device,
            )
            self.kv = HybridLinearKVPool(
                size=self.size,
                full_attention_layer_ids=full,
                mamba_pool=state,
                start_layer=self.layers[0],
                **common,
                **heads,
            )
            mha(self.kv.full_kv_pool, full, "token")
            start = np.cumsum([0, *groups[:-1]])
            channels = np.concatenate(
                [s + place.tp * g // ranks.tp + np.arange(g // ranks.tp) for s, g in zip(start, groups, strict=True)]
            )
            temporal = place.tp * 8 // ranks.tp + np.arange(8 // ranks.tp)
            for index, layer in enumerate(linear):
                self._region(
                    f"conv{layer}", state.mamba_cache.conv[0][index], byte_columns(channels, inner * 2), "slot"
                )
                self._region(f"ssm{layer}", state.mamba_cache.temporal[index], byte_columns(temporal, 64), "slot")
        elif model.state == "dsa":
            latent = model.head_dim * 2
            self.kv = DSATokenToKVPool(
                size=self.size,
                kv_lora_rank=latent,
                qk_rope_head_dim=16,
                layer_num=per_stage,
                index_head_dim=128,
                kv_cache_dim=latent + 16,
                **common,
                **span,
            )
            mla(self.kv, self.layers)
            for layer, tensor in zip(self.layers, self.kv.index_k_with_scale_buffer, strict=True):
                self._region(f"index{layer}", tensor, None, "page")
        elif model.mla:
            self.kv = MLATokenToKVPool(
                size=self.size,
                kv_lora_rank=model.head_dim * 2,
                qk_rope_head_dim=16,
                layer_num=per_stage,
                **common,
                **span,
            )
            mla(self.kv, self.layers)
        else:
            self.kv = MHATokenToKVPool(size=self.size, layer_num=per_stage, **common, **heads, **span)
            mha(self.kv, self.layers, "token")
        if model.draft_layers:
            self.draft = MHATokenToKVPool(size=self.size, layer_num=model.draft_layers, **common, **heads)
            mha(self.draft, list(range(model.draft_layers)), "token", "draft ")
        if role == "decode":
            for region in self.regions:
                region.memory.fill_(UNTOUCHED)

        # Random pages, the same on every rank of a server: its ranks take the same decisions.
        order = np.random.default_rng(len(role) + 7 * place.dp)
        pages = self.size // case.page_size
        self.free_pages = [int(p) + 1 for p in order.permutation(pages)]
        self.free_rows = list(range(1, case.rows * 2 + 1))
        capacity = (self.size + case.page_size) * self.dcp
        # On the device, where the kernels of SGLang's staging read it.
        self.req_to_token = torch.zeros((case.rows * 2 + 1, capacity), dtype=torch.int32, device=device)
        slots = np.arange(self.size + case.page_size)
        page_map = np.concatenate([[0], order.permutation(pages) + 1])
        self.swa_of = torch.from_numpy(page_map[slots // case.page_size] * case.page_size + slots % case.page_size)
        self.req_index_to_mamba_index_mapping = torch.from_numpy(
            np.concatenate([[0], order.permutation(case.rows * 2) + 1]).astype(np.int32)
        )

    def _region(
        self, name: str, tensor: torch.Tensor, columns: npt.NDArray[np.int64] | None, addressing: Addressing
    ) -> None:
        memory = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
        assert memory.data_ptr() == tensor.data_ptr()
        if columns is None:
            columns = np.arange(memory.shape[1])
        assert len(columns) == memory.shape[1], (name, len(columns), memory.shape)
        self.regions.append(Region(name, memory, columns, addressing))

    # What SGLang's queues ask of req_to_token_pool.

    def available_size(self) -> int:
        """Free tokens (as token_to_kv_pool_allocator); with a free row it is at least one (as req_to_token_pool)."""
        return len(self.free_pages) * self.page_size if self.free_rows else 0

    def translate_mamba_indices(self, indices: torch.Tensor) -> torch.Tensor:
        return indices

    # What they ask of token_to_kv_pool_allocator.

    def get_kvcache(self) -> Any:
        return self.kv

    def translate_kv_indices_for_transfer(self, indices: torch.Tensor) -> torch.Tensor:
        return indices

    def translate_swa_indices_for_transfer(self, indices: torch.Tensor) -> torch.Tensor:
        return self.swa_of[indices.long()]

    def prealloc_fits_assumes_reclaim(self) -> bool:
        return False

    def prealloc_ceiling_fits(self, full: int, swa: int) -> bool:
        return full <= self.size

    def prealloc_fits(
        self, tree: object, full: int, swa: int, *, full_budget_tokens: int, swa_budget_tokens: Any
    ) -> bool:
        return full <= full_budget_tokens

    # Requests.

    def fits(self, tokens: int) -> bool:
        return bool(self.free_rows) and -(-tokens // self.page_size) <= len(self.free_pages)

    def allocate(self, req: Any, tokens: int) -> None:
        count = -(-tokens // self.page_size)
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        assert len(pages) == count, "the pool is full"
        req.pages = pages
        req.kv.req_pool_idx = self.free_rows.pop(0)
        slots = (np.array(pages)[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:tokens]
        self.req_to_token[req.kv.req_pool_idx, :tokens] = torch.from_numpy(slots.astype(np.int32))

    def free(self, req: Any) -> None:
        self.free_pages += req.pages
        self.free_rows.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None

    def places_of(
        self, region: Region, req: Any, start: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Items of the request's tokens [start, end) in a region, and the rows in which they lie."""
        row = req.kv.req_pool_idx
        if region.addressing == "slot":
            last = np.array([0] if end == req.tokens else [], dtype=np.int64)
            return last, np.full(len(last), int(self.req_index_to_mamba_index_mapping[row]))
        if region.addressing == "window":
            first = max(start, (max(0, req.tokens - self.case.model.window)) // self.page_size * self.page_size)
            items = np.arange(first, max(end, first), dtype=np.int64)
            return items, self.swa_of[self.req_to_token[row, items].long().cpu()].numpy().astype(np.int64)
        items = np.arange(start, end, dtype=np.int64)
        rows = self.req_to_token[row, items].cpu().numpy().astype(np.int64)
        if region.addressing == "page":
            return items[:: self.page_size] // self.page_size, rows[:: self.page_size] // self.page_size
        own = items % self.dcp == self.dcp_rank
        return items[own], rows[own] // self.dcp

    def write(self, req: Any, start: int, end: int, layer: int | None = None) -> None:
        """Writes tokens [start, end) of a request, of one layer if it is given."""
        for region in self.regions:
            if layer is None or region.name.strip("kv") == str(layer):
                region.write(req.bootstrap_room, *self.places_of(region, req, start, end))

    def wrong(self, req: Any, prefix: int) -> tuple[str, ...]:
        """Regions that differ from what prefill wrote behind the prefix, or were written within it."""
        found = []
        for region in self.regions:
            if not region.holds(req.bootstrap_room, *self.places_of(region, req, prefix, req.tokens)):
                found.append(region.name)
            if prefix and region.addressing in ("token", "page"):
                rows = self.places_of(region, req, 0, prefix)[1]
                if bool((region.memory[torch.from_numpy(rows)] != UNTOUCHED).any()):
                    found.append(f"prefix of {region.name}")
        return tuple(found)

    def forget(self, req: Any) -> None:
        """Marks all memory of the request's pages and rows as untouched."""
        for region, rows in self._memory_of(req):
            region.memory[torch.from_numpy(rows)] = UNTOUCHED

    def snapshot(self, req: Any) -> list[torch.Tensor]:
        """Copy of all memory of the request's pages and rows."""
        return [region.memory[torch.from_numpy(rows)].clone() for region, rows in self._memory_of(req)]

    def _memory_of(self, req: Any) -> list[tuple[Region, npt.NDArray[np.int64]]]:
        size = self.case.page_size
        slots = (np.array(req.pages)[:, None] * size + np.arange(size)).ravel()
        found = {
            "token": slots,
            "window": self.swa_of[torch.from_numpy(slots)].numpy(),
            "page": np.array(req.pages),
            "slot": np.array([int(self.req_index_to_mamba_index_mapping[req.kv.req_pool_idx])]),
        }
        return [(region, found[region.addressing]) for region in self.regions]

    def touched(self) -> tuple[str, ...]:
        """Regions that do not hold UNTOUCHED alone."""
        return tuple(region.name for region in self.regions if bool((region.memory != UNTOUCHED).any()))
