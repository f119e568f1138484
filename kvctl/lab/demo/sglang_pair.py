"""A prefill and a decode server of the installed SGLang, with a tiny model and steady requests."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvctl.health.host.view import sglang_problem
from kvctl.lab.demo.sglang_checkpoint import VOCABULARY, write_checkpoint
from kvctl.lab.demo.sglang_servers import CPU_ENVIRONMENT, CPU_FLAGS, Fleet, Prefill, Process, ServerError

_GAP_S = 0.3
_NEW_TOKENS = 16
_LENGTHS = (20, 400)
# Both servers may share a GPU.
_GPU_FLAGS = ("--mem-fraction-static", "0.2")


def run_pair(say: Callable[[str], None]) -> None:
    """Starts the servers and sends requests until the caller is interrupted; then ends them.

    Raises:
        ServerError: SGLang cannot be imported; or a server has ended, with the end of its log and where it is kept.
    """
    flags, environment = (_GPU_FLAGS, {}) if torch.cuda.is_available() else (CPU_FLAGS, CPU_ENVIRONMENT)
    if problem := sglang_problem(sys.executable, {**os.environ, **environment}):
        raise ServerError(f"{problem}; docs/sglang.md has a complete environment for CPUs")
    folder = Path(tempfile.mkdtemp(prefix="kvctl-sglang-"))
    try:
        write_checkpoint(folder / "model")
        fleet = Fleet(Path(sys.executable), folder / "model", folder, flags, environment)
        prefill = fleet.prefill("prefill", "kvctl")
        decode = fleet.decode("decode", "kvctl")
        say(f"starting a prefill and a decode server of SGLang, which takes up to minutes; logs: {folder}")
        with fleet:
            say(f"prefill at {prefill.process.url}, decode at {decode.url}; try kvctl status, kvctl top")
            ending = threading.Event()
            threading.Thread(target=_send_requests, args=(prefill, decode, say, ending), daemon=True).start()
            try:
                while True:
                    for process in fleet.processes:
                        process.check()
                    time.sleep(_GAP_S)
            finally:
                ending.set()
    except ServerError as error:
        raise ServerError(f"{error}\n--- logs are kept in {folder}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _send_requests(prefill: Prefill, decode: Process, say: Callable[[str], None], ending: threading.Event) -> None:
    """Sends requests until the end, in a thread: one whose decode server has died takes minutes to fail."""
    while True:
        prompt = [random.randrange(3, VOCABULARY) for _ in range(random.randint(*_LENGTHS))]
        try:
            prefill.generate(decode, prompt, _NEW_TOKENS)
        except ServerError as error:
            if ending.wait(_GAP_S * 2):
                return
            say(str(error))
        time.sleep(_GAP_S)
