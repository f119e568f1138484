"""KV sender of the backend: a room on a prefill rank, as SGLang's scheduler drives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvctl_agent import Send
from kvctl_agent.integrations.engine_agent import attempt
from kvctl_agent.integrations.sglang.common_conn import Sender
from kvctl_agent.integrations.sglang.deferred_free import DeferredFree
from kvctl_agent.integrations.sglang.layer_pipelining import count_undivided
from kvctl_agent.integrations.sglang.prompt_digests import announced_prompt

logger = logging.getLogger("kvctl")


class KvctlKVSender(Sender):
    """Sender of one room: a `Send` behind SGLang's interface.

    Attributes:
        groups: layer groups in which forwards are passed; empty for none, None before the first forward.
        passed: pages, counted from the end of the decode side's prefix, that were passed in layer groups.
        deferred_free: pages that SGLang has freed and that may still be read.
    """

    groups: Sequence[range] | None = None
    passed = 0
    _handle: Send | None = None
    _finished = False  # whether all of the room was passed
    _listed = True  # whether the entries of the room in SGLang's tables are those of this request
    _refusal: str | None = None  # why the request failed without an entry there
    curr_idx: int  # pages sent so far, counted from the end of the decode side's prefix
    _early_send_wait_event: Any = None  # device event of the next pages, which an earlier forward writes
    _transfer_start_time: float | None = None

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, *args: Any, **kwargs: Any) -> None:
        """Begins to send the room; decode ranks may open it before or after.

        Args:
            args, kwargs: of SGLang's sender, whose number depends on the release.
        """
        self._refusal = mgr.refusal(bootstrap_room)
        self.deferred_free = DeferredFree()
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        self._prompt = announced_prompt()
        if self._refusal is not None:
            self._listed, self.conclude_state = False, KVPoll.Failed
            return
        mgr.decline_misrouted(bootstrap_addr, bootstrap_room)
        mgr.check_room(bootstrap_room)
        self._begin()

    @property
    def sends(self) -> bool:
        """Whether the room has begun and has not ended."""
        return self._handle is not None and self.conclude_state not in (KVPoll.Success, KVPoll.Failed)

    def _begin(self) -> None:
        """Begins to send, unless the room has failed, such as one routed to the wrong dp rank, or must wait."""
        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.request_status.get(room) == KVPoll.Bootstrapping and not manager.is_sending(room):
            self._handle = manager.begin(room, partial(manager.agent.send, room, **self._prompt._asdict()))

    def _poll_with_status(self, check_status: Any) -> Any:
        if self._handle is None and self.conclude_state is None:
            self._begin()  # the room that had this number before may have ended by now
        return super()._poll_with_status(check_status)

    def pop_decode_prefix_len(self) -> int:
        """Returns the tokens of the prompt that the decode side has cached, in whole pages of this side.

        Valid once the room waits for input. Another engine's pages may be smaller, and its prefix may end within a page
        here; of that page the agent sends only the rest.
        """
        prefix, page_size = (self._handle and self._handle.prefix_tokens) or 0, self.kv_mgr.kv_args.page_size
        return int(prefix // page_size * page_size)

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, indices_event: Any = None
    ) -> None:
        """Sends the next pages of the prompt after the decode side's prefix; with the last ones aux row and state.

        Args:
            kv_indices: pages of this rank, integers in host memory.
            state_indices: with the last pages, for each of SGLang's state components the items of this rank.
            indices_event: None: SGLang passes another value to senders alone that say so.
        """
        handle = self._handle
        if handle is None or not self.sends:
            return
        attempt(lambda: self._send(handle, kv_indices, state_indices), self.fail, logger)
        self._record_transfer_indices(kv_indices, state_indices)

    def _send(self, handle: Send, kv_indices: Any, state_indices: Any) -> None:
        self._note_start()
        if self.kv_mgr.unhooked and self.groups is None:
            count_undivided(self, self.num_kv_indices * self.kv_mgr.kv_args.page_size)
        start, self.curr_idx = self.curr_idx, self.curr_idx + len(kv_indices)
        last = self.curr_idx == self.num_kv_indices
        event, self._early_send_wait_event = self._early_send_wait_event, None
        pages = None
        if self.curr_idx > self.passed or not self.passed:
            pages = _after(self._prefix_before(max(start, self.passed)), kv_indices[max(0, self.passed - start) :])
        if last:
            self._finished = True
            states = self.kv_mgr.state_lists(state_indices, self.pop_decode_prefix_len())
            handle.finish(self.aux_index, states, pages, event)
        elif pages is not None:
            handle.pages(pages, event=event)

    def _note_start(self) -> None:
        """Notes when the transfer begins, for SGLang's metrics."""
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()

    def announce(self, groups: Sequence[range], tokens: float) -> None:
        """Sets the layer groups in which the room's forwards are passed, before the first one; as `Send.prefetch`."""
        self.groups = groups
        if groups and self._handle is not None:
            handle = self._handle
            attempt(lambda: handle.prefetch(groups, tokens), self.fail, logger)

    def pass_layers(self, group: range, start: int, pages: Any, last: bool, event: Any) -> None:
        """Passes pages of one layer group, before `send` gets them.

        Args:
            start: number of the first page, counted from the end of the decode side's prefix.
            pages: page numbers in host memory, valid once `event` is done.
            event: device event after the computation; None if the pool is in host memory.
        """
        handle = self._handle
        if handle is None or not self.sends:
            return
        self._note_start()
        sent = max(0, self.curr_idx - start)  # SGLang has sent a prefix that it had cached
        pages, prefix = pages[sent:], self._prefix_before(start + sent)
        indices = _after(prefix, pages) if event is None else partial(_after, prefix, pages)
        attempt(lambda: handle.layers(group, indices, last=last, event=event), self.fail, logger)

    def _prefix_before(self, start: int) -> int:
        """Returns the pages of the decode side's prefix, if the room's first pages are passed now.

        SGLang counts pages from the end of the prefix, Send from the start of the prompt; the prefix is not read.
        """
        return 0 if start else self.pop_decode_prefix_len() // self.kv_mgr.kv_args.page_size

    def fail(self, cause: str) -> None:
        """Fails the room on every rank."""
        self.kv_mgr.fail(self.bootstrap_room, cause)
        if self._handle is not None:
            self._handle.abort(cause)

    def clear(self) -> None:
        self.deferred_free.free()
        if self._listed:
            self._listed = False
            self.kv_mgr.end(self.bootstrap_room, self._handle, self.conclude_state)
            super().clear()

    def failure_exception(self) -> None:
        self.deferred_free.free()
        if self._refusal is not None:
            raise KVTransferError(self.bootstrap_room, self._refusal)
        super().failure_exception()

    def abort(self) -> None:
        """Aborts the room on every rank, at the request of SGLang's client."""
        if not self._finished:  # else SGLang calls `failure_exception`, in a later turn
            self.deferred_free.free()
        if not self._listed:
            return
        super().abort()
        # SGLang does not clear every sender that it aborts.
        self._listed, self._refusal = False, "aborted by the prefill engine"
        self.kv_mgr.withdraw(self.bootstrap_room)
        if self._handle is not None:
            self._handle.abort(self._refusal)


def _after(prefix: int, pages: Any) -> np.ndarray[Any, Any]:
    """Returns page numbers as an array, after those of a prefix that is not read."""
    numbers = np.asarray(pages, np.int32)
    return np.concatenate([np.zeros(prefix, np.int32), numbers]) if prefix else numbers
