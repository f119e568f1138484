"""Versions of SGLang that the plugin supports, and the interfaces of SGLang that it relies on.

`mismatch` compares them with the SGLang of this process before anything of it is changed, so that a release with other
interfaces is left as it is. Older forms of an interface that are supported are in `OLDER_FORMS`; `common_conn` and
`releases` bridge the difference.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

from kvctl_agent.contract.snapshots import Integration

SUPPORTED: tuple[str, ...] = ("0.5.21", "0.5.22", "0.5.23")
"""Releases that the plugin was tested with, the newest last; their post-releases count as the same."""

_D = "sglang.srt.disaggregation"

# Parameters of each function that the plugin calls, overrides or wraps, in order; for a class those of its constructor.
# By module:name, so that the error of a module that cannot be imported is the one that is told.
INTERFACES: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.arg_groups.choices:add_disagg_transfer_backend_choices": ("iterable",),
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type", "source"),
    f"{_D}.utils:get_kv_class": ("transfer_backend", "class_type"),
    f"{_D}.prefill:PrefillBootstrapQueue._init_kv_manager": ("self",),
    f"{_D}.prefill:PrefillBootstrapQueue.create_sender": ("self", "req", "num_kv_heads"),
    f"{_D}.decode:DecodePreallocQueue._init_kv_manager": ("self",),
    f"{_D}.decode:DecodePreallocQueue._send_kv_metadata": (
        "self",
        "decode_req",
        "kv_indices",
        "page_size",
        "state_indices",
        "metadata_kwargs",
    ),
    f"{_D}.prefill:SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill": (
        "self",
        "batch",
        "result",
    ),
    f"{_D}.decode:DecodePreallocQueue.pop_preallocated": ("self", "rids_to_check", "pp_good_rids", "pp_bad_rids"),
    f"{_D}.role_switch:_reject_reason": ("scheduler", "new_role"),
    f"{_D}.common.conn:CommonKVManager": ("args", "disaggregation_mode", "server_args", "is_mla_backend"),
    f"{_D}.common.conn:CommonKVManager.register_to_bootstrap": ("self",),
    f"{_D}.common.conn:CommonKVManager.update_status": ("self", "bootstrap_room", "status"),
    f"{_D}.common.conn:CommonKVManager.try_ensure_parallel_info": ("self", "bootstrap_addr"),
    f"{_D}.common.conn:CommonKVManager.is_abort_release_safe": ("self", "bootstrap_room", "required_acks"),
    f"{_D}.common.conn:CommonKVManager.clear_deferred_abort_state": ("self", "bootstrap_room"),
    f"{_D}.common.conn:CommonKVManager._start_heartbeat_checker_thread": ("self",),
    f"{_D}.common.conn:CommonKVManager._handle_node_failure": ("self", "failed_bootstrap_addr"),
    f"{_D}.common.conn:CommonKVManager._resolve_rank_mapping": ("self", "info"),
    f"{_D}.common.conn:CommonKVSender": ("mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    f"{_D}.common.conn:CommonKVSender.init": ("self", "num_kv_indices", "aux_index"),
    f"{_D}.common.conn:CommonKVSender.send": (
        "self",
        "kv_indices",
        "state_indices",
        "num_kv_tokens",
        "indices_event",
    ),
    f"{_D}.common.conn:CommonKVSender.pop_decode_prefix_len": ("self",),
    f"{_D}.common.conn:CommonKVSender._poll_with_status": ("self", "check_status"),
    f"{_D}.common.conn:CommonKVSender.clear": ("self",),
    f"{_D}.common.conn:CommonKVSender.abort": ("self",),
    f"{_D}.common.conn:CommonKVReceiver": ("mgr", "bootstrap_addr", "bootstrap_room"),
    f"{_D}.common.conn:CommonKVReceiver.send_metadata": (
        "self",
        "kv_indices",
        "aux_index",
        "state_indices",
        "decode_prefix_len",
        "destination",
        "device_kv_indices",
    ),
    f"{_D}.common.conn:CommonKVReceiver._setup_bootstrap_infos": ("self",),
    f"{_D}.common.conn:CommonKVReceiver._send_abort_notification": ("self", "force_arm"),
    f"{_D}.common.conn:CommonKVReceiver._get_bootstrap_info_from_server": (
        "self",
        "prefill_dp_rank",
        "prefill_cp_rank",
        "target_tp_rank",
        "target_pp_rank",
    ),
    f"{_D}.common.conn:CommonKVReceiver._poll": ("self",),
    f"{_D}.common.conn:CommonKVReceiver._clear": ("self",),
}


# Interfaces that layer_pipelining hooks or calls.
PIPELINING_INTERFACES: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler:Scheduler.run_batch": ("self", "batch", "pp_proxy_tensors"),
    f"{_D}.prefill:SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill": ("self", "req"),
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.free_segment": ("self", "free_index", "start_pos"),
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.forward": (
        "self",
        "q",
        "k",
        "v",
        "layer",
        "forward_batch",
        "save_kv_cache",
        "kwargs",
    ),
}

# What the observer hooks, besides methods of one backend: it leaves out those that a backend lacks.
OBSERVED_INTERFACES: Mapping[str, tuple[str, ...]] = {
    f"{_D}.common.conn:CommonKVManager.record_failure": ("self", "bootstrap_room", "failure_reason"),
    f"{_D}.common.conn:CommonKVManager.conclude_transfer": (
        "self",
        "bootstrap_room",
        "status",
        "targets",
        "failure_reason",
    ),
    f"{_D}.common.conn:CommonKVManager.apply_prefill_status": (
        "self",
        "bootstrap_room",
        "status",
        "prefill_rank",
        "failure_reason",
    ),
    f"{_D}.common.conn:CommonKVManager.handle_chunk_ready": ("self", "msg"),
    f"{_D}.common.conn:CommonKVManager._on_heartbeat_success": ("self", "bootstrap_addr"),
    f"{_D}.common.conn:CommonKVReceiver.init": ("self", "prefill_dp_rank"),
    f"{_D}.common.utils:FastQueue.get": ("self",),
    f"{_D}.common.staging_handler:StagingManagerMixin._handle_staging_req": ("self", "msg"),
    f"{_D}.common.staging_handler:DecodeStagingHandler._free_and_send_watermark": ("self", "alloc_id", "_decode_req"),
    f"{_D}.common.staging_handler:PrefillStagingStrategy.check_ready": (
        "self",
        "req",
        "kv_chunk_index_start",
        "num_chunk_pages",
        "session_id",
    ),
}


# Other forms of these interfaces in older releases that are supported; None: the release does not have it.
OLDER_FORMS: Mapping[str, tuple[tuple[str, ...] | None, ...]] = {
    # 0.5.22 and 0.5.21
    f"{_D}.common.conn:CommonKVSender.send": (("self", "kv_indices", "state_indices", "num_kv_tokens"),),
    f"{_D}.common.conn:CommonKVSender._poll_with_status": (None,),
    f"{_D}.common.conn:CommonKVReceiver.send_metadata": (
        ("self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination"),
    ),
    f"{_D}.common.conn:CommonKVManager.handle_chunk_ready": (None,),
    # 0.5.21
    f"{_D}.common.conn:CommonKVSender": (
        (
            "mgr",
            "bootstrap_addr",
            "bootstrap_room",
            "dest_tp_ranks",
            "pp_rank",
            "req_has_disagg_prefill_dp_rank",
        ),
    ),
    f"{_D}.common.conn:CommonKVReceiver._poll": (None,),
    f"{_D}.common.conn:CommonKVReceiver._clear": (None,),
    f"{_D}.prefill:SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill": (None,),
}


def installed() -> str | None:
    """Returns the version of the installed SGLang; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def integration(mode: str) -> Integration:
    """Returns what `kvctl status` shows of SGLang; `mode` is the plugin's."""
    return {"engine": "sglang", "engine_version": installed() or "", "mode": mode, "settings": {}}


def mismatch(interfaces: Mapping[str, tuple[str, ...]] = INTERFACES) -> str | None:
    """Returns the first difference between the installed SGLang and what the plugin supports, as text; None if none."""
    version = installed()
    if version is None or re.sub(r"\.post\d+$", "", version) not in SUPPORTED:
        return f"SGLang {version} is not supported (supported: {', '.join(SUPPORTED)})"
    for name, expected in interfaces.items():
        older = OLDER_FORMS.get(name, ())
        try:
            found = _parameters(pkgutil.resolve_name(name))
        except AttributeError as error:
            if None in older:
                continue
            return f"SGLang {version} has no {name} ({error})"
        except Exception as error:
            return f"SGLang {version} cannot be imported: {first_cause(error)}"
        if found is not None and found != expected and found not in older:
            return f"SGLang {version}: {name} has parameters ({', '.join(found)}), expected ({', '.join(expected)})"
    return None


def first_cause(error: BaseException) -> str:
    """Returns the type and text of the error that others were raised for: of a package that is missing, for example."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    return f"{type(error).__name__}: {error}"


def _parameters(target: Any) -> tuple[str, ...] | None:
    """Returns the names of a callable's parameters; None for a built-in without a signature."""
    try:
        return tuple(inspect.signature(target).parameters)
    except ValueError:
        return None


def main() -> None:
    """Prints why the plugin does not fit the SGLang that this Python imports, and exits with 1; nothing if it fits."""
    if difference := mismatch():
        print(difference)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
