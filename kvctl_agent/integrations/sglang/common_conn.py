"""Sender and receiver of SGLang's `disaggregation/common/conn.py`, with what releases before 0.5.23 leave to backends.

`Sender` and `Receiver` are SGLang's own classes where these have the methods, and otherwise classes derived from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender, KVTransferError

_ENDED = (KVPoll.Success, KVPoll.Failed)


class _PolledSender(CommonKVSender):
    """Sender before 0.5.23, which does not poll."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_time = time.time()  # from which SGLang counts its bootstrap timeout

    def poll(self) -> Any:
        return self._poll_with_status(self.kv_mgr.check_status)

    def poll_pp_consensus(self) -> Any:
        """As `poll`, for all pipeline stages; not called before 0.5.22."""
        return self._poll_with_status(self.kv_mgr.check_status_pp_consensus)

    def _poll_with_status(self, check_status: Callable[[int], Any]) -> Any:
        if self.conclude_state is None:
            status = _status(self, check_status, KVPoll.Bootstrapping, self._check_bootstrap_timeout)
            if status == KVPoll.Success and self._transfer_start_time is not None:
                self._transfer_metric.transfer_latency_s = time.perf_counter() - self._transfer_start_time
            return status
        return self.conclude_state

    def failure_exception(self) -> None:
        _fail(self)


class _FailingReceiver(CommonKVReceiver):
    """Receiver before 0.5.23, which does not say why it failed."""

    def failure_exception(self) -> None:
        _fail(self)


class _PolledReceiver(_FailingReceiver):
    """Receiver before 0.5.22, which does not poll."""

    def init(self, prefill_dp_rank: int) -> None:
        if self.conclude_state is None:  # else the state in SGLang's table may be another request's
            super().init(prefill_dp_rank)

    def poll(self) -> Any:
        return self._poll()

    def _poll(self) -> Any:
        if self.conclude_state is None:
            return _status(self, self.kv_mgr.check_status, KVPoll.WaitingForInput, self._check_waiting_timeout)
        return self.conclude_state

    def clear(self) -> None:
        self._clear()

    def _clear(self) -> None:
        super().clear()


def _status(end: Any, check_status: Callable[[int], Any], waiting: Any, timed_out: Callable[[], Any]) -> Any:
    """Returns the state of a room, and keeps the last one in `conclude_state`.

    Args:
        waiting: state that has a time limit; `timed_out` returns the state after it, or None before.
    """
    room = end.bootstrap_room
    status = check_status(room) if room in end.kv_mgr.request_status else KVPoll.Failed
    if status == waiting and (late := timed_out()) is not None:
        status = late
    if status in _ENDED:
        end.conclude_state = status
    return status


def _fail(end: Any) -> NoReturn:
    """Clears a room that has failed, and raises KVTransferError with the cause."""
    end.conclude_state = KVPoll.Failed
    end.clear()
    with end.kv_mgr.failure_lock:
        cause = end.kv_mgr.failure_records.pop(end.bootstrap_room, None)
    text = "the room failed on another rank" if cause is None else cause
    raise KVTransferError(end.bootstrap_room, text, is_from_another_rank=cause is None)


def _first_with(methods: Iterable[str], *kinds: Any) -> Any:
    """Returns the first class that has all of these methods, besides those of its abstract base, which do nothing."""
    return next(kind for kind in kinds if all(_has(kind, method) for method in methods))


def _has(kind: Any, method: str) -> bool:
    return any(method in vars(part) for part in kind.__mro__ if part.__module__ != KVPoll.__module__)


Sender: Any = _first_with(("_poll_with_status", "failure_exception"), CommonKVSender, _PolledSender)
Receiver: Any = _first_with(("_clear", "failure_exception"), CommonKVReceiver, _FailingReceiver, _PolledReceiver)
