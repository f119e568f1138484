"""What SGLang's scheduler does with its KV manager outside of requests: sleep mode, and the end of a role."""

from typing import Any


def sleep_and_wake(scheduler: Any) -> None:
    """Releases the pool's memory from the transfer engine and takes it again, as release/resume_memory_occupation."""
    scheduler.kv_manager.deregister_buffer_to_engine()
    scheduler.kv_manager.register_buffer_to_engine()


def rebuild(scheduler: Any) -> list[str]:
    """Tears the manager down and creates another for the same pool, as a role switch does; returns what it left."""
    old = scheduler.kv_manager
    old.teardown()
    left = [] if old.agent.parts.lifecycle.state == "closed" else ["the agent runs"]
    if old._zmq_ctx.closed is False:
        left.append("sockets of SGLang's base class")
    heartbeat = getattr(old, "_heartbeat", None)
    if heartbeat is not None and heartbeat.is_alive():
        left.append("the heartbeat thread")
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None) or scheduler.disagg_decode_prealloc_queue
    queue.kv_manager = scheduler.kv_manager = queue._init_kv_manager()
    return left
