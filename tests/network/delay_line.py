"""Carries Ethernet frames between two TAP devices, each frame after a delay: `delay_line.py NEAR FAR SECONDS`.

Creates both devices, writes "ready", and runs until its standard input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 1 << 16


def tap(name: str) -> int:
    """Creates a TAP device; returns its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def main(near: str, far: str, delay_s: float) -> None:
    ends = [tap(near), tap(far)]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order of their time: the delay is the same for all
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], wait_s)
        if sys.stdin in ready:
            return
        for end in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    waiting.append((time.monotonic() + delay_s, other[end], os.read(end, _FRAME_BYTES)))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device is down, or its queue is full: a network loses such frames
                os.write(end, frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
