"""Entry point of the SGLang plugin: what it changes in SGLang, by the mode in the variable KVCTL_SGLANG.

backend (default): `--disaggregation-transfer-backend kvctl` becomes a choice; nothing else changes. replace: the name
`nixl` stands for kvctl as well. observe: SGLang's own backends are served on kvctl's admin socket. off: nothing.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any

from kvctl_agent.contract.sglang import BACKEND, MODES, VARIABLE, mode
from kvctl_agent.integrations.sglang import versions

logger = logging.getLogger("kvctl")

_RELEASE_TIMEOUT = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"


def load() -> None:
    """Registers the plugin with SGLang; called by SGLang in each process.

    It never raises: a plugin that does not fit, or fails, leaves SGLang as it is and says so in one line of the log.
    """
    chosen = mode()
    if chosen is None:
        logger.error(
            "kvctl plugin not loaded: %s=%s is no mode; set one of %s",
            VARIABLE,
            os.environ.get(VARIABLE),
            ", ".join(MODES),
        )
        return
    if chosen == "off":
        return
    try:
        difference = versions.mismatch()
        if difference is not None:
            logger.error("kvctl plugin not loaded, SGLang is unchanged: %s", difference)
            return
        if chosen == "observe":
            from kvctl_agent.integrations.sglang.observe.observer import install

            install()
        else:
            _add_backend(takeover=chosen == "replace")
    except Exception as error:
        logger.error("kvctl plugin not loaded: %s", versions.first_cause(error))
        return
    logger.info("kvctl plugin loaded: mode %s, SGLang %s", chosen, versions.installed())


def _add_backend(takeover: bool) -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    names = {BACKEND, "nixl"} if takeover else {BACKEND}

    def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend.value in names:
            return _classes().get(class_type.value) or original(transfer_backend, class_type)
        return original(transfer_backend, class_type)

    def with_facts(original: Callable[..., Any], queue: Any) -> Any:
        if queue.transfer_backend.value not in names:
            return original(queue)
        from kvctl_agent.integrations.sglang.pools import announced

        with announced(queue):
            manager = original(queue)
        transfers = getattr(queue, "transfer_queue", None)
        if transfers is not None and _RELEASE_TIMEOUT not in os.environ:
            # SGLang reuses the pages of a failed request after 30 s, even if a writer is still alive. The agent knows
            # when none is, and refuses pages before.
            transfers.deferred_kv_release_timeout = math.inf
        return manager

    def create_sender(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.transfer_backend.value not in names:
            return original(queue, req, *args, **kwargs)
        from kvctl_agent.integrations.sglang import prompt_digests

        with prompt_digests.announced(queue.scheduler, req):
            return original(queue, req, *args, **kwargs)

    def send_metadata(original: Callable[..., Any], queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.transfer_backend.value in names:
            from kvctl_agent.integrations.sglang import prompt_digests

            kv_indices = args[0] if args else kwargs["kv_indices"]  # one for each token after the prefix
            tokens = kwargs.get("decode_prefix_len", 0) + len(kv_indices)
            decode_req.kv_receiver.prompt = prompt_digests.prompt_of(queue.scheduler, decode_req.req, tokens)
        return original(queue, decode_req, *args, **kwargs)

    def reject_reason(original: Callable[..., Any], scheduler: Any, new_role: str) -> Any:
        rejection = original(scheduler, new_role)
        if rejection is None and scheduler.transfer_backend.value in names:
            from kvctl_agent.integrations.sglang.unsupported import role_switch_obstacle

            obstacle = role_switch_obstacle(scheduler, new_role)
            return obstacle and (obstacle, True)  # True: the server still serves its role
        return rejection

    disaggregation = "sglang.srt.disaggregation"
    for target, hook in {
        "utils.get_kv_class": kv_class,
        "prefill.PrefillBootstrapQueue._init_kv_manager": with_facts,
        "prefill.PrefillBootstrapQueue.create_sender": create_sender,
        "decode.DecodePreallocQueue._init_kv_manager": with_facts,
        "decode.DecodePreallocQueue._send_kv_metadata": send_metadata,
        "role_switch._reject_reason": reject_reason,
    }.items():
        HookRegistry.register(f"{disaggregation}.{target}", hook, HookType.AROUND)
    # Last, so that the name is no choice where a hook failed; the hooks do nothing for other names.
    _add_member(TransferBackend)
    add_disagg_transfer_backend_choices([BACKEND])


def _classes() -> dict[str, Any]:
    """Returns the backend's classes by SGLang's name of their kind, imported when SGLang asks for the first."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from kvctl_agent.integrations.sglang.manager import KvctlKVManager
    from kvctl_agent.integrations.sglang.receiver import KvctlKVReceiver
    from kvctl_agent.integrations.sglang.sender import KvctlKVSender

    return {
        "manager": KvctlKVManager,
        "sender": KvctlKVSender,
        "receiver": KvctlKVReceiver,
        # SGLang's own: only the rows that our managers put into it differ.
        "bootstrap_server": CommonKVBootstrapServer,
    }


def _add_member(backends: Any) -> None:
    """Makes `TransferBackend("kvctl")` return a member of its own; the enumeration has no extension point."""
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    former = backends._missing_

    def missing(cls: Any, value: object) -> Any:
        return member if value == BACKEND else former(value)

    backends._missing_ = classmethod(missing)
