"""A prefill and a decode server of the installed SGLang, with a tiny model and steady requests."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvctl.lab.demo.sglang_checkpoint import VOCABULARY, write_checkpoint
from kvctl.lab.demo.sglang_servers import CPU_FLAGS, Fleet, ServerError

_GAP_S = 0.3
_NEW_TOKENS = 16
_LENGTHS = (20, 400)
# Both servers may share a GPU.
_GPU_FLAGS = ("--mem-fraction-static", "0.2")


def run_pair(say: Callable[[str], None]) -> None:
    """Starts the servers and sends requests until the caller is interrupted; then ends them.

    Raises:
        ServerError: a server did not start, with the end of its log.
    """
    flags = _GPU_FLAGS if torch.cuda.is_available() else CPU_FLAGS
    with tempfile.TemporaryDirectory(prefix="kvctl-sglang-") as folder:
        write_checkpoint(Path(folder) / "model")
        fleet = Fleet(Path(sys.executable), Path(folder) / "model", Path(folder), flags, {})
        prefill = fleet.prefill("prefill", "kvctl")
        decode = fleet.decode("decode", "kvctl")
        say(f"starting a prefill and a decode server of SGLang, which takes up to minutes; logs: {folder}")
        with fleet:
            say(f"prefill at {prefill.process.url}, decode at {decode.url}; try kvctl status, kvctl top")
            while True:
                prompt = [random.randrange(3, VOCABULARY) for _ in range(random.randint(*_LENGTHS))]
                try:
                    prefill.generate(decode, prompt, _NEW_TOKENS)
                except ServerError as error:
                    say(str(error))
                time.sleep(_GAP_S)
