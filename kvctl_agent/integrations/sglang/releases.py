"""What differs between releases of SGLang in its scheduler and settings, one function for each difference.

Each looks for the newer form, so that releases are told apart by what they have. `common_conn` does the same for
senders and receivers; `versions` lists the interfaces.
"""

from __future__ import annotations

import importlib
from typing import Any


def num_dp_ranks() -> int:
    """Returns the data-parallel ranks of this server, replicas or attention groups (before 0.5.22: `dp_size`)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(getattr(parallel, "num_dp_ranks", None) or parallel.dp_size)


def ranks_agree_on_held_pages() -> bool:
    """Returns whether the decode ranks of a server hold and release the pages of failed requests at the same time.

    Before 0.5.23 each rank decides alone. Ranks with unlike numbers of free pages then admit unlike requests.
    """
    return hasattr(importlib.import_module("sglang.srt.disaggregation.utils"), "all_reduce_flags")


def sends_index_rows_of_prefix() -> bool:
    """Returns whether both sides pass the index rows of the prefix that decode has cached (before 0.5.23)."""
    return not hasattr(importlib.import_module("sglang.srt.mem_cache.common"), "suffix_page_indices")


def checkpoint_of(scheduler: type) -> str | None:
    """Returns the name of the scheduler's method that puts a request's pages into the prefix cache, if any."""
    names = "checkpoint_disagg_prefill", "cache_unfinished_disagg_prefill"
    return next((name for name in names if hasattr(scheduler, name)), None)


def extend_end(req: Any) -> int:
    """Returns the tokens of a request that the present forward completes (before 0.5.22: the end of a range)."""
    return int(req.extend_end if hasattr(req, "extend_end") else req.extend_range.end)


def prefix_len(req: Any) -> int:
    """Returns the tokens of a request that are in the pool before the present forward (before 0.5.22: their slots)."""
    return int(req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices))


def staging_context(manager: Any) -> Any:
    """Returns the state of a manager's staging, None without it; before 0.5.23 the attribute is then missing."""
    return getattr(manager, "_staging_ctx", None)
