"""Chooses the parameters of NIXL's UCX backend that concern its threads.

With `num_threads`, the backend has that many threads, each with its own UCX worker and endpoints to all peers. A write
of at least `split_batch_size` descriptors is divided among them; smaller ones are posted on the calling thread, as
without threads. Measured with NIXL 1.5.1 between processes of one host, over CMA and over TCP:

- Order: the tag is sent after each thread has flushed its endpoint. 1,200 writes of 2,048 descriptors, two in flight,
  with 2 and 4 threads: no tag arrived before its bytes.
- Polling: unchanged. The threads copy without a call of the writer, but its `poll` sends the tag, and wire-up needs
  calls of the target. The first divided write to a peer takes 20 to 35 ms, because every thread wires up.
- Posts: a post of 4,096 pages of 32 KiB returns after 5 ms instead of 31, but waits for threads that still copy an
  earlier write. A stopped peer does not delay it.
- Idle threads sleep (CPU time below 0.1 %). With a write pending to a peer that does not answer, all threads that have
  a share of it poll without a pause until it is complete, or has failed because the peer was disconnected.
- A dead peer is reported by each thread that meets it, so a write posted after the first report may still be accepted
  and fail in `poll`.
- File descriptors: 9 to 10 per thread, and per peer one for each thread, at both ends. Those of a disconnected peer are
  closed when the threads send the next divided write.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvctl_agent.errors import ConfigError

DESCRIPTORS_PER_THREAD = 10

# A hand-over to a thread costs 50 to 80 µs, as much as 8 descriptors of 32 KiB or 30 of 512 bytes. NIXL's default of
# 1024 leaves rooms of up to 256 tokens (32 layers, pages of 16 tokens) to one core.
_SPLIT_BATCH_SIZE = "128"


def thread_count(params: Mapping[str, str]) -> int:
    """Returns the number of threads that backend parameters specify.

    Raises:
        ConfigError: `num_threads` is not a number.
    """
    text = params.get("num_threads", "0")
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"transport_params: num_threads is {text!r}; it takes a number of threads, 0 for none")
    return int(text)


def with_threads(params: Mapping[str, str], automatic: int) -> dict[str, str]:
    """Returns transport parameters completed with those of the threads; configured ones are kept.

    Args:
        params: the configured parameters.
        automatic: the number of threads if `params` has none.
    """
    if params.get("backend", "UCX") != "UCX" or not thread_count({"num_threads": str(automatic), **params}):
        return dict(params)
    return {
        **params,
        "num_threads": params.get("num_threads", str(automatic)),
        "split_batch_size": params.get("split_batch_size", _SPLIT_BATCH_SIZE),
    }
