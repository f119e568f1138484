"""KV receiver of the backend: a room on a decode rank, as SGLang's scheduler drives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvctl_agent import KvctlError, Receive
from kvctl_agent.contract.values import shown
from kvctl_agent.integrations.engine_agent import attempt
from kvctl_agent.integrations.sglang.bootstrap_http import CLIENT, BootstrapError
from kvctl_agent.integrations.sglang.common_conn import Receiver
from kvctl_agent.integrations.sglang.prompt_digests import UNKNOWN

logger = logging.getLogger("kvctl")

_LOOK_UP_S = 5.0  # SGLang's own timeout
_LOOK_UP_AGAIN_S = 0.5  # of a server that was known; the scheduler stands still meanwhile


class KvctlKVReceiver(Receiver):
    """Receiver of one room: a `Receive` behind SGLang's interface, from `send_metadata` on."""

    _handle: Receive | None = None
    _listed = True  # whether the entries of the room in SGLang's tables are those of this request
    _refusal: str | None = None  # why the request failed without an entry there
    _open: Callable[[], Receive] | None = None  # opens the room, until it is begun
    _endpoint: str | None = None  # of the registry of the room's prefill instance
    prompt = UNKNOWN  # set by the plugin before `send_metadata`

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._refusal = mgr.refusal(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if self._refusal is not None:
            self._listed, self.conclude_state = False, KVPoll.Failed
        else:
            mgr.check_room(bootstrap_room)

    def _setup_bootstrap_infos(self) -> None:
        """Finds the registry of the room's prefill instance and connects to it; the room fails if there is none."""
        self.bootstrap_infos: Any = None
        if attempt(self._find_instance, self._fail, logger):
            self.bootstrap_infos = [{"endpoint": self._endpoint}]

    def _find_instance(self) -> bool:
        """Sets `_endpoint` and returns True; raises KvctlError if there is no usable instance."""
        manager, addr, dp_rank = self.kv_mgr, self.bootstrap_addr, self.prefill_dp_rank
        self._endpoint, is_current = manager.known_instance(addr, dp_rank)
        if not is_current:
            # Also while the instance is not connected: a restarted server has another registry.
            try:
                found = str(CLIENT.row(addr, dp_rank, _LOOK_UP_S if self._endpoint is None else _LOOK_UP_AGAIN_S))
            except KvctlError as error:
                text = f"bootstrap server {shown(addr)} gives no address of dp rank {dp_rank}: {error}"
                if self._endpoint is None:
                    raise BootstrapError(text) from None
                logger.warning("kvctl: %s", text)
            else:
                manager.use_instance(addr, dp_rank, found)
                self._endpoint = found
        return True

    def _fail(self, cause: str) -> None:
        self.kv_mgr.fail(self.bootstrap_room, cause)
        self.conclude_state = KVPoll.Failed

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Opens the room: passes the pages that receive the prompt after its cached prefix.

        Args:
            kv_indices: pages of this rank, int32 in host memory.
            state_indices: for each of SGLang's state components the items of this rank.
            decode_prefix_len: tokens of the prompt that are cached here.
        """
        if self.conclude_state is not None:
            return
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            self._fail("host KV destinations are not supported")
            return
        if not self.kv_mgr.knows(self._endpoint):  # receive() would connect to it again
            self._fail(f"prefill server {self.bootstrap_addr} was replaced before the room was opened")
            return
        self._open = partial(
            self.kv_mgr.agent.receive,
            self.bootstrap_room,
            kv_indices,
            prefill=self._endpoint,
            prefix_tokens=decode_prefix_len or 0,
            aux_index=aux_index,
            state_indices=self.kv_mgr.state_lists(state_indices, decode_prefix_len or 0),
            **self.prompt._asdict(),
        )
        self._begin()
        self.init_time = time.time()

    def _begin(self) -> None:
        """Opens the room, unless one that had its number before is in use still."""
        if self._open is None or self.conclude_state is not None or self.kv_mgr.agent.is_open(self.bootstrap_room):
            return
        self._handle, self._open = self.kv_mgr.begin(self.bootstrap_room, self._open), None
        if self._handle is None:
            self.kv_mgr.refuse(self.bootstrap_room, self._endpoint)
            self.abort_notified = True

    def _poll(self) -> Any:
        self._begin()
        return super()._poll()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Ends the room on every rank."""
        handle = self._handle
        if handle is None:
            self.kv_mgr.refuse(self.bootstrap_room, self._endpoint)
        else:
            handle.abort("aborted by the decode engine")
            self.kv_mgr.hold(self.bootstrap_room, handle)

    def _clear(self) -> None:
        if self._listed:  # SGLang clears a receiver again when it releases its pages
            self._listed = False
            self.kv_mgr.end(self.bootstrap_room, self._handle, self.conclude_state)
            super()._clear()

    def failure_exception(self) -> None:
        if self._refusal is not None:
            raise KVTransferError(self.bootstrap_room, self._refusal)
        super().failure_exception()
