"""Rank processes, and the process that forks them.

`python -m tests.support.sglang.rank FD` imports torch and SGLang, which takes seconds, and then forks a rank for each
request that arrives on the socket with file descriptor FD: an environment, a log file, and the rank's end of a pipe.
"""

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import urllib.request
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.sglang.runtime import HOST, Runtime, import_sglang, on_gpu
from tests.support.sglang.scheduler import decode_scheduler, prefill_scheduler


def start_bootstrap_server(runtime: Runtime, deadline_s: float) -> Any:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    server = get_kv_class(TransferBackend(runtime.case.backend), KVClassType.BOOTSTRAP_SERVER)(
        host=HOST, port=runtime.bootstrap_port
    )
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            urllib.request.urlopen(f"http://{HOST}:{runtime.bootstrap_port}/health", timeout=1).close()
            return server
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(pipe: Connection) -> None:
    """Runs a rank, which takes the case, its place in it, and then commands; or one function with its arguments."""
    first = pipe.recv()
    if callable(first[0]):
        pipe.send(("done", first[0](*first[1:])))
        return
    case, role, place, port, folder, deadline_s = first
    try:
        runtime = Runtime(case, role, place, port, folder, deadline_s)
        if runtime.device != "cpu":
            torch.cuda.set_device(runtime.gpu)
        runtime.start()

        def say(event: str, room: int) -> None:
            pipe.send(("event", event, room))

        server = None
        if role == "prefill":
            if runtime.index == 0:
                server = start_bootstrap_server(runtime, deadline_s)
            torch.distributed.barrier()
            scheduler = prefill_scheduler(runtime, deadline_s, say)
        else:
            scheduler = decode_scheduler(runtime, deadline_s, say)
        names = {"manager": type(scheduler.kv_manager).__name__, "server": type(server).__name__}
        pipe.send(("ready", names))
        while True:
            command, *arguments = pipe.recv()
            if command == "stop":
                break
            if command == "call":  # a function of the test's module, with the scheduler
                function, *rest = arguments
                pipe.send(("done", function(scheduler, *rest)))
                continue
            pipe.send(("done", getattr(scheduler, command)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def main() -> None:
    die_with_parent()
    if not on_gpu():  # SGLang's import initialises CUDA, which no forked process can use
        import_sglang()
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for ranks: they are watched through their pidfd
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            run_rank(requests, message, *files)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def run_rank(requests: socket.socket, message: bytes, log: int, pipe: int) -> None:
    try:
        die_with_parent()
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if on_gpu():
            import_sglang()
        os.environ.clear()
        os.environ.update(pickle.loads(message))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.register(signal.SIGUSR1)
        logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(message)s", force=True)
        serve(Connection(pipe))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # threads of SGLang's managers never end


if __name__ == "__main__":
    main()
