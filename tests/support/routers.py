"""ROUTER sockets that answer as admin servers do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import zmq

Answer = Callable[[list[bytes]], list[bytes] | None]


@contextmanager
def router(*addresses: str, answer: Answer) -> Iterator[str]:
    """A ROUTER that sends the result of `answer(frames)`, or nothing if it is None; yields its last address."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    for address in addresses:
        socket.bind(address)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if socket.poll(20):
                route, *frames = socket.recv_multipart()
                if (reply := answer(frames)) is not None:
                    socket.send_multipart([route, *reply])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield socket.last_endpoint.decode().rstrip("\0")
    finally:
        stop.set()
        thread.join()
        socket.close()
        context.term()


def batched(answer: Answer) -> Answer:
    """Answers as an observer: `answer` gets the frames of the request to each agent, and its name as the fourth."""

    def answer_all(frames: list[bytes]) -> list[bytes] | None:
        parts = [
            answer([frames[0], b"%b.%d.%d" % (frames[1], agent, place), body, name])
            for agent, name in enumerate(frames[3].split(b"\0"))
            for place, body in enumerate(frames[2].split(b"\0"))
        ]
        replies = [b'["%b",%b]' % (part[1], part[2]) for part in parts if part is not None]
        return [b"KVA1", b"", b"[%b]" % b",".join(replies)] if replies else None

    return answer_all


def answer_with(frames: list[bytes], data: Any) -> list[bytes]:
    """Answers a request."""
    return [b"KVA1", frames[1], orjson.dumps({"ok": True, "data": data})]


def refused(frames: list[bytes], code: str, message: str) -> list[bytes]:
    """Refuses a request."""
    return [b"KVA1", frames[1], orjson.dumps({"ok": False, "error": {"code": code, "message": message}})]
