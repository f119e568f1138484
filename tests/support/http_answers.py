"""HTTP servers that give one answer to every request, whatever it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


@contextlib.contextmanager
def serving(pieces: bytes | Iterable[bytes], pause_s: float = 0.0) -> Iterator[str]:
    """Serves bytes as they are, piece by piece with a pause between them; yields the server's address `host:port`."""
    ending = threading.Event()

    def answer(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(1 << 16)
            for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                client.sendall(piece)
                if ending.wait(pause_s) if pause_s else ending.is_set():
                    return

    def accept() -> None:
        threads = []
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=answer, args=[client]))
            threads[-1].start()
        for thread in threads:
            thread.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ending.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
