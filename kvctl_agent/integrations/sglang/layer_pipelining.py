"""Sends the KV of a forward in layer groups while SGLang computes later layers (the setting `pipeline`).

SGLang has no interface for that. Before a forward, the groups of each request are announced to its sender. During it,
each call of the attention backend's `forward` shows that a layer begins: layers before it have written their KV, or
will have when an event that is recorded then is done. Hooks on the decoder layers would not run, because SGLang's
default graphs of the prefill replace their methods. Groups for which the backend was not called are passed after the
forward.

SGLang frees a request's own pages when its cache has the same tokens, which another request has put there meanwhile.
They may still be read then, so that is deferred until SGLang has ended the request (`deferred_free`). All ranks of a
server must defer alike, so they do, and have the hooks, if `pipeline` was not off when the server started.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvctl_agent import ForwardInfo
from kvctl_agent.integrations.engine_agent import attempt
from kvctl_agent.integrations.sglang import releases, versions

logger = logging.getLogger("kvctl")

# Caches and allocators whose pages are freed by `free_segment` of the allocator and by nothing else.
_ALLOCATORS = frozenset({"TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"})
_CACHES = frozenset({"RadixCache", "UnifiedRadixCache", "ChunkCache"})
# Options with which layers are computed twice, or two batches in turns, or loads of a prefix fail after the forward.
# SGLang's checksum is of the pages in its cache, not of a request's own.
_OPTIONS = (
    "enable_two_batch_overlap",
    "enable_single_batch_overlap",
    "enable_pdmux",
    "elastic_ep_backend",
    "disaggregation_enable_kv_checksum",
    "enable_unified_cache_external_linker",
)
_STATES = frozenset({"mamba"})  # the others are sent from the pages in SGLang's cache, such as scales of KV elsewhere


def install() -> bool:
    """Puts the hooks on SGLang's scheduler, once in a process; returns False if this release does not fit them."""
    # The scheduler's module has been imported in a process that has a scheduler; importing it takes seconds.
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is None or "_kvctl_pipelining" in vars(module.Scheduler):
        return True
    scheduler, difference = module.Scheduler, versions.mismatch(versions.PIPELINING_INTERFACES)
    name = releases.checkpoint_of(scheduler)
    if difference is not None or name is None:
        logger.error("kvctl: layers cannot be pipelined: %s", difference or "SGLang's scheduler has no checkpoint")
        return False
    scheduler._kvctl_pipelining = True
    run_batch, checkpoint = scheduler.run_batch, getattr(scheduler, name)

    @functools.wraps(run_batch)
    def pipelined(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        forward = attempt(lambda: forward_of(scheduler, batch), _log, logger)
        if forward is None:
            return run_batch(scheduler, batch, *args, **kwargs)
        with forward.watched():
            result = run_batch(scheduler, batch, *args, **kwargs)
        forward.end(scheduler.forward_stream if scheduler.enable_overlap else None)
        return result

    @functools.wraps(checkpoint)
    def checkpointed(scheduler: Any, req: Any, **kwargs: Any) -> Any:
        deferred = getattr(req.disagg_kv_sender, "deferred_free", None)  # other backends' senders have none
        if deferred is None or not _can_split(scheduler, _states(req.disagg_kv_sender)):
            return checkpoint(scheduler, req, **kwargs)
        with deferred.deferring(scheduler.token_to_kv_pool_allocator):
            return checkpoint(scheduler, req, **kwargs)

    scheduler.run_batch = pipelined
    setattr(scheduler, name, checkpointed)
    return True


def count_undivided(sender: Any, tokens: int) -> None:
    """Counts a request as undivided whose forwards the hooks do not see; `tokens` are those that it computes."""
    sender.groups = ()
    sender.kv_mgr.agent.layer_groups(ForwardInfo((tokens,), split_forward=False))


def forward_of(scheduler: Any, batch: Any) -> Forward | None:
    """Announces the layer groups of a batch's requests; returns the forward, or None if no request has groups."""
    if not batch.forward_mode.is_extend():
        return None
    requests = [
        req for req in batch.reqs if not req.pending_bootstrap and getattr(req.disagg_kv_sender, "sends", False)
    ]
    if not requests:
        return None
    fresh = [req for req in requests if req.disagg_kv_sender.groups is None]
    if fresh:
        sender = fresh[0].disagg_kv_sender
        forward = ForwardInfo(
            tokens=tuple(max(0, len(req.origin_input_ids) - releases.prefix_len(req)) for req in fresh),
            draft=not scheduler.spec_algorithm.is_none(),
            split_forward=_can_split(scheduler, _states(sender)),
        )
        grouping = sender.kv_mgr.agent.layer_groups(forward)
        with sender.kv_mgr.agent.batch():
            for req in fresh:
                req.disagg_kv_sender.announce(grouping.groups, forward.average_tokens)
    of_requests = [each for req in requests if (each := _pages_of(scheduler, req)) is not None]
    if not of_requests:
        return None
    pages = _on_host([each.pages for each in of_requests])
    offset = 0
    for each in of_requests:
        count = len(each.pages)
        each.pages = pages[offset : offset + count]
        offset += count
    return Forward(scheduler.tp_worker.model_runner.attn_backend, of_requests)


class _RequestPages:
    """Pages of one request, whose sender is a `KvctlKVSender`, that a forward completes.

    Attributes:
        pages: their numbers; on a GPU they are valid once the forward has begun there.
        groups: layer groups that have not been passed yet, ascending.
    """

    def __init__(self, sender: Any, start: int, pages: Any, last: bool) -> None:
        self.sender = sender
        self.pages = pages
        self.groups = list(sender.groups or ())
        self._start = start
        self._last = last

    def pass_until(self, layer: int, event: Any) -> None:
        """Passes the groups that end at `layer` or before."""
        while self.groups and self.groups[0].stop <= layer:
            self.sender.pass_layers(self.groups.pop(0), self._start, self.pages, self._last, event)

    def end(self) -> None:
        self.sender.passed = self._start + len(self.pages)


class Forward:
    """One forward whose layers are passed in groups.

    Args:
        backend: SGLang's attention backend, whose `forward` computes the attention of one layer.
        requests: pages of the requests of the batch; at least one.
    """

    def __init__(self, backend: Any, requests: Sequence[_RequestPages]) -> None:
        self._backend = backend
        self._requests = requests
        first, self._end = requests[0].groups[0].start, requests[0].groups[-1].stop
        # SGLang's numbers count all layers of the model, the agent's only those with KV.
        ids = requests[0].sender.kv_mgr.kv_args.kv_layer_ids or range(first, self._end)
        self._numbers = dict(zip(ids, range(first, self._end), strict=False))
        self._next = first  # the layer that begins next
        self._edges = sorted({group.stop for each in requests for group in each.groups}, reverse=True)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Puts a wrapper around `forward` of the attention backend that passes what is complete at each layer."""
        backend, compute = self._backend, self._backend.forward

        @functools.wraps(compute)
        def compute_layer(*args: Any, **kwargs: Any) -> Any:
            layer = kwargs.get("layer", args[3] if len(args) > 3 else None)
            number = getattr(layer, "layer_id", -1)
            attempt(lambda: self.begins(number), self._fail, logger)
            result = compute(*args, **kwargs)
            if kwargs.get("save_kv_cache", args[5] if len(args) > 5 else True):
                attempt(lambda: self.has_written(number), self._fail, logger)
            return result

        own = "forward" in vars(backend)
        backend.forward = compute_layer
        try:
            yield
        finally:
            if own:
                backend.forward = compute
            else:
                del backend.forward

    def begins(self, layer_id: int) -> None:
        """Passes the groups that are complete when a layer begins; ignores layers out of order."""
        layer = self._numbers.get(layer_id, -1)
        if layer == self._next:
            self._next += 1
            if self._edges and layer >= self._edges[-1]:
                self._pass_until(layer, None)

    def has_written(self, layer_id: int) -> None:
        """Passes all groups once the last layer has written its KV."""
        if self._edges and self._next == self._end and self._numbers.get(layer_id) == self._end - 1:
            self._pass_until(self._end, None)

    def end(self, stream: Any) -> None:
        """Passes what is left after the forward, which runs on `stream`; None: on the current one."""
        if self._edges:
            attempt(lambda: self._pass_until(self._end, stream), self._fail, logger)
        for each in self._requests:
            each.end()

    def _pass_until(self, layer: int, stream: Any) -> None:
        event, manager = None, self._requests[0].sender.kv_mgr
        if manager.on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream or torch.cuda.current_stream())
        while self._edges and self._edges[-1] <= layer:
            self._edges.pop()
        with manager.agent.batch():
            for each in self._requests:
                each.pass_until(layer, event)

    def _fail(self, cause: str) -> None:
        """Fails the requests of the batch; the forward goes on."""
        self._edges.clear()
        for each in self._requests:
            each.sender.fail(cause)


def _pages_of(scheduler: Any, req: Any) -> _RequestPages | None:
    """Returns the pages of a request that are not passed yet and that the next forward completes; None without any."""
    sender, page_size = req.disagg_kv_sender, scheduler.token_to_kv_pool_allocator.page_size
    if not sender.groups:
        return None
    start, end = max(sender.passed, sender.curr_idx), releases.extend_end(req)
    last = end >= len(req.origin_input_ids)
    first = req.disagg_decode_prefix_len + start * page_size
    end = min(end, len(req.origin_input_ids)) if last else end - end % page_size
    if first >= end:
        return None
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, first:end:page_size]
    return _RequestPages(sender, start, slots // page_size, last)


def _on_host(pages: Sequence[Any]) -> Any:
    """Returns page numbers in host memory, one after another; those of a GPU are copied when its stream comes to it."""
    numbers = torch.cat(list(pages)).to(torch.int32)
    if not numbers.is_cuda:
        return numbers.numpy()
    host = torch.empty(numbers.shape, dtype=torch.int32, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    return host


def _states(sender: Any) -> tuple[str, ...]:
    """Returns the kinds of per-request state of a sender's server."""
    return tuple(kind.value for kind in sender.kv_mgr.kv_args.state_types)


@functools.cache
def _can_split(scheduler: Any, states: tuple[str, ...]) -> bool:
    """Returns whether this server's forwards can be passed in groups; if not, the log says once why."""
    allocator, cache = type(scheduler.token_to_kv_pool_allocator).__name__, type(scheduler.tree_cache).__name__
    obstacles = [option for option in _OPTIONS if getattr(scheduler.server_args, option, None)]
    obstacles += [allocator] if allocator not in _ALLOCATORS else []
    obstacles += [cache] if cache not in _CACHES else []
    obstacles += [f"state {state}" for state in states if state not in _STATES]
    if obstacles:
        logger.warning("kvctl: layers are not pipelined on this server because of %s", ", ".join(obstacles))
    return not obstacles


def _log(cause: str) -> None:
    logger.error("kvctl: the layers of a forward are not pipelined: %s", cause)
