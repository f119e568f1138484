"""What the scheduler tells the workers in each step, and the parameters that requests carry between servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvctl_agent import prompt_digest, room_number
from kvctl_agent.contract.states import MAX_ROOM
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.integrations.engine_agent import attempt
from kvctl_agent.request_id import valid_traceparent

LOGGER = "vllm.kvctl"  # below vLLM's logger, the only one for which its processes have a handler
logger = logging.getLogger(LOGGER)

TRANSFER_ID = "transfer_id"
PREFILL = "kvctl_prefill"
TRACEPARENT = "traceparent"

Transfer = str | int
"""Id of a transfer: a text whose hash is the room, or the room itself, such as a `bootstrap_room` of SGLang."""

Blocks = tuple[list[int], ...]
"""Blocks of each KV cache group that takes part in transfers, in vLLM's order."""


class SendRequest(NamedTuple):
    """Prefill: a request whose KV is to be sent.

    Attributes:
        request: vLLM's id of the request.
        transfer: id of the transfer, which has the room.
        traceparent: W3C trace context of the request; "" without one.
        tokens: tokens of the prompt that are sent.
    """

    request: str
    transfer: Transfer
    traceparent: str
    tokens: int
    digest: int | None


class ComputedBlocks(NamedTuple):
    """Prefill: the next blocks of a prompt, which the step computes.

    Attributes:
        blocks: the blocks of each group after those of former steps; -1 for one that has left the group's window.
            Of a group of Mamba layers always the block with the state.
        tokens: tokens of the request that the step computes.
    """

    request: str
    blocks: Blocks
    tokens: int
    last: bool
    prompt: int


class ReceiveRequest(NamedTuple):
    """Decode: a request whose KV is to be received.

    Attributes:
        request: vLLM's id of the request.
        transfer: id of the transfer, which has the room.
        prefill: endpoint of the registry of the prefill instance.
        traceparent: W3C trace context of the request; "" without one.
        blocks: for each group the blocks to fill.
        prefix_tokens: tokens of the prompt that are cached here.
        tokens: tokens of the prompt that are received or cached.
    """

    request: str
    transfer: Transfer
    prefill: str
    traceparent: str
    blocks: Blocks
    prefix_tokens: int
    tokens: int
    digest: int | None


@dataclass
class KvctlMetadata(KVConnectorMetadata):
    """The connector's part of one scheduler step.

    Attributes:
        sends: requests that arrived at prefill.
        cached: prefill: blocks that the prefix cache has of prompts that begin; the step does not write them.
        receives: requests that have blocks at decode now.
        aborted: (request, reason) of requests that ended before their transfer.
        preempted: requests at prefill whose blocks vLLM has taken back.
        refused: (transfer, prefill, reason) of requests that ended at decode before they had blocks.
        expected: for each prefill instance the transfers that decode is going to open.
    """

    sends: list[SendRequest] = field(default_factory=list)
    cached: list[tuple[str, Blocks]] = field(default_factory=list)
    computed: list[ComputedBlocks] = field(default_factory=list)
    receives: list[ReceiveRequest] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    refused: list[tuple[Transfer, str, str]] = field(default_factory=list)
    expected: dict[str, list[Transfer]] = field(default_factory=dict)
    computes: bool = True


def is_sent(params: Mapping[str, Any] | None) -> bool:
    """Whether the KV of a request with these parameters is sent to a decode server."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def is_received(params: Mapping[str, Any] | None) -> bool:
    """Whether the KV of a request with these parameters is received from a prefill server, and has not been opened."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def digest_of(request: Any, tokens: int, media_hashed: bool) -> int | None:
    """Returns the digest of the first `tokens` of a request's prompt; None if not all that determines its KV is known.

    Args:
        media_hashed: whether vLLM identifies images and the like by their content.
    """
    media = [feature.identifier for feature in request.mm_features]
    if request.prompt_token_ids is None or request.prompt_embeds is not None or (media and not media_hashed):
        return None
    lora, salt = request.lora_request.lora_name if request.lora_request else "", request.cache_salt or ""
    fail = partial(logger.error, "kvctl: the prompt of request %s is not compared: %s", request.request_id)
    return attempt(
        lambda: prompt_digest(request.prompt_token_ids[:tokens], lora=lora, salt=salt, media=media), fail, logger
    )


def traceparent_of(request: Any) -> str:
    """Returns the trace context of a request: that of its parameters, else of its headers; "" without a valid one.

    vLLM passes headers on only if its own tracing is on.
    """
    own = valid_traceparent(text_of(request.kv_transfer_params, TRACEPARENT))
    return own or valid_traceparent(text_of(request.trace_headers or {}, TRACEPARENT))


def transfer_of(params: Mapping[str, Any], default: Transfer = "") -> Transfer:
    """Returns the id of the transfer that the parameters name; `default` if they name none that has a room."""
    value = params.get(TRANSFER_ID)
    if not isinstance(value, Transfer) or isinstance(value, bool):
        return default
    try:
        room = room_of(value)
    except LocalProtocolError:
        return default
    return value if 0 <= room <= MAX_ROOM else default


def room_of(transfer: Transfer) -> int:
    """Returns the room of a transfer."""
    return transfer if isinstance(transfer, int) else room_number(transfer)


def text_of(params: Mapping[str, Any], name: str) -> str:
    """Returns a parameter that must be text; "" if it is not."""
    value = params.get(name)
    return value if isinstance(value, str) else ""
