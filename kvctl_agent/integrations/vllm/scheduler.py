"""The connector's half in vLLM's scheduler: the blocks that each step computes, and those that receive a prompt.

A prefill server sends a request with `do_remote_decode`, a decode server receives one with `do_remote_prefill`. Both
know the room from the text `transfer_id`, which a router mints, or the prefill server returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kvctl_agent.integrations.vllm.metadata import (
    LOGGER,
    PREFILL,
    TRACEPARENT,
    TRANSFER_ID,
    Blocks,
    ComputedBlocks,
    KvctlMetadata,
    ReceiveRequest,
    SendRequest,
    Transfer,
    digest_of,
    is_received,
    is_sent,
    text_of,
    traceparent_of,
    transfer_of,
)
from kvctl_agent.integrations.vllm.pools import first_spec, is_state

logger = logging.getLogger(LOGGER)

_NULL_BLOCK = 0  # vLLM's placeholder for a block that has left the window of its group
_RENEW_S = 5.0  # several times within the agent's default `hold_s` here, 30 s


@dataclass
class _Send:
    """A request at prefill: its transfer, tokens of its prompt, and how many blocks of each group were passed on."""

    transfer: Transfer
    tokens: int
    passed: list[int] = field(default_factory=list)
    complete: bool = False


class ConnectorScheduler:
    """Scheduler half of the connector.

    Args:
        registry: endpoint of the registry of this prefill instance.
        dcp_size: decode context parallel ranks; a block has `block_size` tokens on each of them.
        media_hashed: whether vLLM identifies images and the like in prompts by their content.
    """

    def __init__(self, registry: str, config: KVCacheConfig, dcp_size: int, media_hashed: bool = True) -> None:
        self._registry = registry
        self._media_hashed = media_hashed
        self._config = config
        groups = config.transfer_groups
        self._block_tokens = [group.kv_cache_spec.block_size * dcp_size for group in groups]
        specs = [first_spec(group.kv_cache_spec) for group in groups]
        self._windows = [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs]
        self._states = [is_state(group) for group in groups]
        # Decode computes the last token of a prompt: from the state after the tokens before it, and from the window
        # before it, of which vLLM has no block for the first token if decode is said to have the last token already.
        self._left_to_decode = int(any(self._states) or any(self._windows))
        self._sends: dict[str, _Send] = {}
        self._receives: set[str] = set()  # opened by the workers, not yet reported as received
        self._expected: dict[str, tuple[str, Transfer]] = {}  # request -> (prefill, transfer), not opened yet
        self._renewed = 0.0  # monotonic time
        self._next = KvctlMetadata()

    # ---- requests --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Takes note of a request: prefill ranks begin its room, decode ranks keep it open at the prefill server."""
        params, name = request.kv_transfer_params, request.request_id
        if is_sent(params):
            transfer = transfer_of(params, name)
            self._shorten(request)
            tokens = request.num_prompt_tokens
            self._sends[name] = _Send(transfer, tokens)
            digest = digest_of(request, tokens, self._media_hashed)
            self._next.sends.append(SendRequest(name, transfer, traceparent_of(request), tokens, digest))
        elif is_received(params):
            transfer, prefill = transfer_of(params), text_of(params, PREFILL)
            if transfer != "" and prefill:
                self._expected[name] = prefill, transfer
                self._renewed = 0.0
            else:
                logger.warning(
                    "kvctl: request %s has do_remote_prefill but no %s and text %s: it is computed here",
                    name, TRANSFER_ID, PREFILL,
                )  # fmt: skip

    def _shorten(self, request: Any) -> None:
        """Takes the tokens from a prompt at prefill that decode computes from the state after those before them."""
        count = self._left_to_decode
        if not count or request.num_prompt_tokens <= count:
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-count:]
        else:
            request.prompt_embeds = request.prompt_embeds[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Returns how many tokens of a prompt are received after the `computed` ones that are cached here."""
        count = request.num_prompt_tokens - self._left_to_decode - computed
        return (count, True) if count > 0 and request.request_id in self._expected else (0, False)

    def allocated(self, request: Any, blocks: Any, received: int) -> None:
        """Passes the blocks of a request that is received; `received` is 0 if nothing is, as its prompt is cached."""
        name, params = request.request_id, request.kv_transfer_params
        expected = self._expected.pop(name, None)
        if expected is None:
            return
        params["do_remote_prefill"] = False  # only once, also if the request is preempted later
        prefill, transfer = expected
        if not received:
            self._next.refused.append(
                (transfer, prefill, "the decode engine has cached the prompt, or computes it itself")
            )
            return
        tokens = request.num_prompt_tokens - self._left_to_decode
        table = self._config.select_transfer_block_ids(blocks.get_block_ids())
        self._receives.add(name)
        self._next.receives.append(
            ReceiveRequest(
                name,
                transfer,
                prefill,
                traceparent_of(request),
                self._to_fill(table, tokens - received, tokens),
                tokens - received,
                tokens,
                digest_of(request, tokens, self._media_hashed),
            )
        )

    def _to_fill(self, table: Sequence[list[int]], cached: int, tokens: int) -> Blocks:
        """Returns for each group the blocks of tokens [cached, tokens), in a sliding window only the last ones."""
        found = []
        for blocks, size, window, state in zip(table, self._block_tokens, self._windows, self._states, strict=True):
            if state:
                found.append(blocks[:1])
                continue
            first = cached if window is None else max(cached, tokens - window)
            found.append([block for block in blocks[first // size : -(-tokens // size)] if block != _NULL_BLOCK])
        return tuple(found)

    def step(self, output: Any) -> KvctlMetadata:
        """Returns what the workers must know of a step."""
        meta, self._next = self._next, KvctlMetadata()
        meta.computes = bool(output.total_num_scheduled_tokens)
        for name in output.preempted_req_ids or ():
            if send := self._sends.get(name):
                send.passed, send.complete = [], False
                meta.preempted.append(name)
        if self._sends:
            requests = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            requests.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for name, computed in requests.items():
                if (send := self._sends.get(name)) and not send.complete:
                    if computed and not send.passed:
                        self._pass_cached(meta, output, name, send, requests)
                    self._compute(meta, output, name, send, computed)
        if self._expected and time.monotonic() >= self._renewed + _RENEW_S:
            self._renewed = time.monotonic()
            for prefill, transfer in self._expected.values():
                meta.expected.setdefault(prefill, []).append(transfer)
        return meta

    def _pass_cached(
        self, meta: KvctlMetadata, output: Any, name: str, send: _Send, requests: Mapping[str, int]
    ) -> None:
        """Adds the blocks of a prompt that are cached to `meta`: they are sent while the step computes the others.

        vLLM's prefix cache also has blocks that this step computes for another request, or copies.

        Args:
            requests: tokens that were computed before the step, of each request in it.
        """
        if output.kv_cache_block_copies:
            return
        written: set[int] = set()
        for each, computed in requests.items():
            end = computed + output.num_scheduled_tokens[each]
            for blocks, size in zip(self._table(output, each), self._block_tokens, strict=True):
                written.update(blocks[computed // size : -(-end // size)])
        table = self._table(output, name)
        tokens = requests[name]
        for blocks, size in zip(table, self._block_tokens, strict=True):
            complete = blocks[: tokens // size]
            tokens = size * next((place for place, block in enumerate(complete) if block in written), len(complete))
        send.passed = [tokens // size for size in self._block_tokens]
        if any(send.passed):
            cached = zip(table, send.passed, self._states, strict=True)
            meta.cached.append((name, tuple([] if state else _kept(each[:last]) for each, last, state in cached)))

    def _table(self, output: Any, name: str) -> Sequence[list[int]]:
        """Returns the blocks of a request in each group."""
        blocks = output.kv_connector_block_state.resolve_block_ids(name)
        return self._config.select_transfer_block_ids(blocks)  # type: ignore[no-any-return]

    def _compute(self, meta: KvctlMetadata, output: Any, name: str, send: _Send, computed: int) -> None:
        """Adds the blocks of a request that are complete after a step to `meta`."""
        scheduled = output.num_scheduled_tokens[name]
        end, tokens = computed + scheduled, send.tokens
        table = self._table(output, name)
        send.complete = end >= tokens
        passed = send.passed or [0] * len(table)
        send.passed = [-(-tokens // size) if send.complete else end // size for size in self._block_tokens]
        blocks = tuple(
            each[:1] if state else _kept(each[first:last])
            for each, first, last, state in zip(table, passed, send.passed, self._states, strict=True)
        )
        meta.computed.append(ComputedBlocks(name, blocks, scheduled, send.complete, tokens))

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request; returns whether its blocks must stay until the workers report it, and its parameters."""
        name = request.request_id
        if expected := self._expected.pop(name, None):
            self._next.refused.append(
                (expected[1], expected[0], "the request ended before the decode engine had blocks")
            )
            return False, None
        if name in self._receives:  # vLLM keeps the blocks until it is reported as received
            self._next.aborted.append((name, "the request ended at the decode engine"))
            return False, None
        send = self._sends.pop(name, None)
        if send is None:
            return False, None
        done = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not (done and send.complete):
            self._next.aborted.append((name, "the request ended at the prefill engine before its prompt was computed"))
            return True, None
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            TRANSFER_ID: send.transfer,
            PREFILL: self._registry,
        }
        if traceparent := traceparent_of(request):
            params[TRACEPARENT] = traceparent
        return True, params

    def received(self, names: set[str] | None) -> None:
        """Forgets requests that the workers have reported as received."""
        self._receives.difference_update(names or ())

    @property
    def pending(self) -> bool:
        """Whether the workers must be told something, for which vLLM must make a step even without requests."""
        return self._next != KvctlMetadata()


def _kept(blocks: Sequence[int]) -> list[int]:
    """Returns blocks with -1 for those that have left the window of their group."""
    return [block if block != _NULL_BLOCK else -1 for block in blocks]
