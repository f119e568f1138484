"""Sleep mode: the agents of a worker process give vLLM's KV cache back before vLLM frees its memory.

vLLM tells a connector nothing of sleep mode. The backend that frees and restores memory can be replaced by name,
however: this one is vLLM's own, and calls the agents before the memory goes and after it has come back.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

_BACKEND = "kvctl"
_REPLACED = "cumem"
_KV_CACHE = "kv_cache"  # vLLM's tag of the KV cache's memory


class Sleeper(Protocol):
    """Something that uses the KV cache of this process."""

    def suspend(self) -> None:
        """Gives the memory back; raises if it must stay."""

    def resume(self) -> None:
        """Takes the memory again, at the same addresses; does nothing if it was not given back."""


_sleepers: WeakSet[Sleeper] = WeakSet()


class KvctlSleepModeBackend(CuMemBackend):
    """vLLM's backend, which frees no memory that agents use."""

    def suspend(self, level: int = 1) -> None:
        _suspend_all()
        super().suspend(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        if _KV_CACHE in tags:
            _suspend_all()
        super().discard(tags)

    def resume(self, tags: list[str] | None = None) -> None:
        super().resume(tags)
        if tags is None or _KV_CACHE in tags:
            for sleeper in list(_sleepers):
                sleeper.resume()


def follow_sleep_mode(model_config: Any, sleeper: Sleeper) -> None:
    """Has `sleeper` follow the sleep mode of this worker process.

    Args:
        model_config: configuration of the worker's model, which names the backend of sleep mode.
    """
    _sleepers.add(sleeper)
    if model_config.sleep_mode_backend == _REPLACED:
        model_config.sleep_mode_backend = _BACKEND


def check_sleep_mode(model_config: Any) -> None:
    """Checks that the memory of the KV cache cannot be freed without the agent's knowledge.

    Raises:
        ValueError: it can be; the text names the backend.
    """
    backend = model_config.sleep_mode_backend
    if model_config.enable_sleep_mode and backend not in (_BACKEND, _REPLACED):
        raise ValueError(
            f"kvctl's connector does not support sleep mode with the backend {backend}: set sleep_mode_backend to "
            f"{_REPLACED}"
        )


def _suspend_all() -> None:
    sleepers = list(_sleepers)
    try:
        for sleeper in sleepers:
            sleeper.suspend()
    except BaseException:
        for sleeper in sleepers:
            sleeper.resume()
        raise


SleepModeBackendFactory.register_backend(_BACKEND, __name__, KvctlSleepModeBackend.__name__)
