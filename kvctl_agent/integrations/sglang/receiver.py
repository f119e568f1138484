"""KV receiver of the backend: a room on a decode rank, as SGLang's scheduler drives it."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import requests
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from kvctl_agent.errors import KvctlError
from kvctl_agent.runtime.handles import Receive

logger = logging.getLogger("kvctl")

_LOOK_UP_S = 5.0  # SGLang's own timeout
_LOOK_UP_AGAIN_S = 0.5  # of a server that was known; the scheduler stands still meanwhile


class KvctlKVReceiver(CommonKVReceiver):
    """Receiver of one room: a `Receive` behind SGLang's interface, from `send_metadata` on."""

    _handle: Receive | None = None
    _endpoint: str | None = None  # of the registry of the room's prefill instance
    prompt_tokens: int | None = None  # length of the prompt, set by the plugin before `send_metadata`
    request_id = ""  # SGLang's rid, likewise; SGLang gives senders only the room

    def _setup_bootstrap_infos(self) -> None:
        """Finds the registry of the room's prefill instance and connects to it; the room fails if there is none."""
        manager, room, addr = self.kv_mgr, self.bootstrap_room, self.bootstrap_addr
        self.bootstrap_infos: Any = None
        self._endpoint, is_current = manager.known_instance(addr, self.prefill_dp_rank)
        if not is_current:
            # Also while the instance is not connected: a restarted server has another registry.
            found = self._look_up(_LOOK_UP_S if self._endpoint is None else _LOOK_UP_AGAIN_S)
            if found is None and self._endpoint is None:
                self._fail(f"the bootstrap server {addr} does not know dp rank {self.prefill_dp_rank}")
                return
            try:
                if found is not None:
                    manager.use_instance(addr, self.prefill_dp_rank, found)
                    self._endpoint = found
            except KvctlError as error:
                self._fail(f"prefill server {addr}, room {room}: {error}")
                return
        self.bootstrap_infos = [{"endpoint": self._endpoint}]

    def _look_up(self, timeout_s: float) -> str | None:
        """Returns the registry's endpoint from the bootstrap server; None if it does not answer or does not know it."""
        query = {
            "prefill_dp_rank": self.prefill_dp_rank,
            "prefill_cp_rank": 0,
            "target_tp_rank": 0,
            "target_pp_rank": 0,
        }
        try:
            answer = requests.get(f"http://{self.bootstrap_addr}/route", params=query, timeout=timeout_s)
            answer.raise_for_status()
            row = answer.json()
            host, port = str(row["rank_ip"]), int(row["rank_port"])
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            logger.warning("kvctl: bootstrap server %s: %s", self.bootstrap_addr, error)
            return None
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

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
            aux_index: row of the metadata buffers.
            state_indices: for each of SGLang's state components the items of this rank.
            decode_prefix_len: tokens of the prompt that are cached here.
        """
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("kvctl: host KV destinations are not supported")
        if self.conclude_state is not None:
            return
        if not self.kv_mgr.knows(self._endpoint):  # receive() would connect to it again
            self._fail(f"prefill server {self.bootstrap_addr} was replaced before the room was opened")
            return
        self._handle = self.kv_mgr.begin(
            self.bootstrap_room,
            partial(
                self.kv_mgr.agent.receive,
                self.bootstrap_room,
                kv_indices,
                prefill=self._endpoint,
                prefix_tokens=decode_prefix_len or 0,
                aux_index=aux_index,
                state_indices=self.kv_mgr.state_lists(state_indices),
                tokens=self.prompt_tokens,
                request_id=self.request_id,
            ),
        )
        if self._handle is None:
            self.kv_mgr.refuse(self.bootstrap_room, self._endpoint)
            self.abort_notified = True
        self.init_time = time.time()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Ends the room on every rank."""
        handle = self._handle
        if handle is None:
            self.kv_mgr.refuse(self.bootstrap_room, self._endpoint)
        else:
            handle.abort("aborted by the decode engine")
            self.kv_mgr.hold(self.bootstrap_room, handle)

    def _clear(self) -> None:
        self.kv_mgr.end(self.bootstrap_room, self._handle)
        super()._clear()
