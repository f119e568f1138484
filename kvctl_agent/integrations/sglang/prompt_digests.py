"""Id and trace context of a request, and length and digest of its prompt, which both ends compare.

SGLang gives senders only the room.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from kvctl_agent import prompt_digest
from kvctl_agent.integrations.engine_agent import attempt

logger = logging.getLogger("kvctl")

_EMBEDDED = ("multimodal_inputs", "input_embeds", "positional_embed_overrides")  # of a request: more than tokens


class Prompt(NamedTuple):
    """Length of a prompt and its `prompt_digest`, None if unknown; id and W3C trace context of its request."""

    tokens: int | None = None
    digest: int | None = None
    request_id: str = ""
    traceparent: str = ""


UNKNOWN = Prompt()
_announced: ContextVar[Prompt] = ContextVar("prompt", default=UNKNOWN)


@contextmanager
def announced(scheduler: Any, req: Any) -> Iterator[None]:
    """Keeps the prompt of a request of SGLang for the sender that is created inside the context."""
    token = _announced.set(prompt_of(scheduler, req, len(req.origin_input_ids)))
    try:
        yield
    finally:
        _announced.reset(token)


def announced_prompt() -> Prompt:
    """Returns the prompt that is announced; unknown outside of a context."""
    return _announced.get()


def prompt_of(scheduler: Any, req: Any, tokens: int) -> Prompt:
    """Returns the prompt of a request of SGLang.

    Args:
        tokens: length of the prompt; after a retraction with what the request has generated.
    """
    fail = partial(logger.error, "kvctl: the prompt of request %s is not compared: %s", req.rid)
    digest = attempt(lambda: _digest_of(scheduler, req, tokens), fail, logger)
    fail = partial(logger.error, "kvctl: the spans of request %s are not in its trace: %s", req.rid)
    return Prompt(tokens, digest, str(req.rid), attempt(lambda: _traceparent_of(req), fail, logger) or "")


def _traceparent_of(req: Any) -> str:
    """Returns the trace context of the request's span in SGLang; "" without `--enable-trace`.

    That span is a child of the client's, if the client or the router has sent a `traceparent`.
    """
    context = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
    if context is None or context.tracing_enable is not True:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, context.root_span_context)
    return headers.get("traceparent", "")


def _digest_of(scheduler: Any, req: Any, tokens: int) -> int | None:
    """Returns the digest of the first `tokens` of a request; None if not all that determines its KV is known.

    It is unknown if embeddings take the place of tokens, or with images and the like: SGLang hashes what its processor
    computes from them, which may differ between hosts, or numbers them at random.
    """
    ids = req.origin_input_ids
    if len(ids) < tokens:
        ids = ids + req.output_ids
    lora = _lora_name(scheduler, req.lora_id)
    if lora is None or any(getattr(req, name, None) is not None for name in _EMBEDDED):
        return None
    return prompt_digest(ids[:tokens], lora=lora, salt=getattr(req, "cache_salt", None) or "")


def _lora_name(scheduler: Any, lora_id: str | None) -> str | None:
    """Returns the name of a LoRA adapter, whose id is another on each server; "" without one, None if unknown."""
    if lora_id is None:
        return ""
    adapters = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    adapter = adapters.lora_refs.get(lora_id) if adapters is not None else None
    return adapter.lora_name if adapter is not None else None
