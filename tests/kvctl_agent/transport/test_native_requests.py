"""NIXL's native code with numbers, states and processes that its callers do not produce."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.native.nixl_requests import Library, WriteRequests
from kvctl_agent.runtime.waiting import turns_of_loop
from kvctl_agent.transport.nixl.native_requests import UNLIMITED_NS
from kvctl_agent.transport.nixl.transport import NixlTransport

HOST = (-1, -1)


def half_open() -> set[tuple[str, ...]]:
    """Connections of this process to a listener of its own that the listener has not accepted: both addresses."""
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(str(path.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ends = {(row[1], row[2]) for row in rows if f"socket:[{row[9]}]" in links}
    ports = {local.rpartition(":")[2] for local, remote in ends if remote.endswith(":0000")}
    return {(local, remote) for local, remote in ends if remote[-4:] in ports and (remote, local) not in ends}


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    transport = NixlTransport("native", {})
    assert transport._native is not None
    deadline = time.monotonic() + 60
    while half_open():  # NIXL connects each agent to itself, and a thread of UCX accepts
        assert time.monotonic() < deadline, half_open()
        time.sleep(0.001)
    yield transport._native
    transport.close()


def words(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def requests(library: Any, **other: Any) -> Any:
    given = {
        "peer": "nobody", "local": words(4096), "remote": words(4096), "sizes": words(8),
        "devices": HOST, "ends": [1], "tags": [b"t"], "until_ns": UNLIMITED_NS, "linger_ns": 0, "threads": 0, **other,
    }  # fmt: skip
    return WriteRequests(library, *given.values())


LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        ({"sizes": words(LARGEST)}, ValueError, "outside the address space"),
        ({"local": words(1 << 63)}, ValueError, "outside the address space"),
        ({"remote": words((1 << 63) - 4)}, ValueError, "outside the address space"),
        (
            {name: words(*numbers) for name, numbers in (("local", (1, 1, 1)), ("remote", (1, 1, 1)))}
            | {"sizes": words(1 << 62, 1 << 62, 1 << 62), "ends": [3]},
            ValueError,
            "outside the address space",
        ),
        ({"local": np.frombuffer(bytes(9), np.uint64, offset=1)}, TypeError, "aligned and in one dimension"),
        ({"local": words(4096).astype(np.int64)}, TypeError, "must be uint64"),
        ({"linger_ns": UNLIMITED_NS}, ValueError, "at most a second"),
        ({"linger_ns": -1}, ValueError, "at most a second"),
        ({"threads": -1}, ValueError, "threads and devices"),
        ({"devices": (-2, -1)}, ValueError, "threads and devices"),
        ({"ends": [2]}, ValueError, "every request has descriptors"),
        ({"ends": [-1]}, OverflowError, "negative"),
        ({"tags": []}, ValueError, "at least one request"),
    ],
)
def test_numbers_that_do_not_fit(library: Any, other: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        requests(library, **other)


def test_objects_that_are_not_initialised_or_initialised_twice(library: Any) -> None:
    new = WriteRequests.__new__(WriteRequests)
    new.stop()
    for name, args in (("post", (True,)), ("resume", (0,)), ("poll", ())):
        with pytest.raises(ValueError, match="were not made"):
            getattr(new, name)(*args)
    for name in ("error", "post_ns", "skipped", "unposted", "then"):
        with pytest.raises(ValueError, match="were not made"):
            getattr(new, name)
    closed = Library.__new__(Library)
    for call in (
        lambda: closed.tell("a", b""),
        lambda: closed.wait(bytearray(), 0, 1, 1, turns_of_loop().calls),
        lambda: requests(closed),
    ):
        with pytest.raises(ValueError, match="open"):
            call()
    with pytest.raises(ValueError, match="made before"):
        requests(library).__init__(library, "p", words(1), words(1), words(1), HOST, [1], [b""], 0, 0, 0)


def test_a_wait_of_any_length_ends_at_its_time(library: Any) -> None:
    for timeout_ns in (0, -1, -(1 << 63)):
        assert library.wait(bytearray(), timeout_ns, UNLIMITED_NS, 1, turns_of_loop().calls)[0] == {}
    with pytest.raises(ValueError, match="array of struct pollfd"):
        library.wait(bytearray(7), 0, 1, 1, turns_of_loop().calls)


def test_requests_that_several_threads_post_are_posted_once(crew: Any) -> None:
    writer, reader = crew.agent("nixl"), crew.agent("nixl")
    writer.transport.connect("peer", reader.transport.metadata())
    count, row_bytes = 64, 65536
    where = np.arange(count) * row_bytes
    for value in range(1, 6):
        writer.pool[:] = value
        made = requests(
            writer.transport._native, peer=writer.transport._peer("peer").engine_name, local=writer.at(*where),
            remote=reader.at(*where), sizes=np.full(count, row_bytes, np.uint64), ends=list(range(1, count + 1)),
            tags=[b"\0%d" % number for number in range(count)],
        )  # fmt: skip
        threads = [threading.Thread(target=made.post, args=(False,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + 60
        while not made.poll():
            assert time.monotonic() < deadline
            reader.wait()
        assert made.error == 0
        tags = [arrival.tag for arrival in reader.collect(count) + reader.collect(1, timeout_s=0.05)]
        assert sorted(tags) == sorted(b"%d" % number for number in range(count))
        assert (reader.pool[: count * row_bytes] == value).all()


UNBUILT = """
import sys
class Unbuilt:
    def find_spec(name, path=None, target=None):
        if name == "kvctl_agent.native.nixl_requests":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Unbuilt)
import kvctl_agent.native
"""


def test_native_code_that_is_not_built_is_named_with_the_command_that_builds_it() -> None:
    done = subprocess.run([sys.executable, "-c", UNBUILT], capture_output=True, text=True, timeout=60)
    assert "(No module named 'kvctl_agent.native.nixl_requests'): in a checkout, build it: make setup" in done.stderr


FORK = """
import gc, os, signal, sys, time
import numpy as np
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.transport.base import Region
from kvctl_agent.native.nixl_requests import Library
from kvctl_agent.transport.nixl.transport import NixlTransport

pool = CopyPool(2, os.eventfd(0)).start()
writer, reader = NixlTransport("writer", {"num_threads": "2"}, copy_pool=pool), NixlTransport("reader", {})
here, there = np.zeros(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
for transport, memory in ((writer, here), (reader, there)):
    transport.register([Region(memory.ctypes.data, memory.nbytes)])
writer.connect("peer", reader.metadata())
rows = np.arange(0, 64 << 20, 1 << 16, np.uint64)
sizes = np.full(len(rows), 1 << 16, np.uint64)
address = lambda memory: rows + np.uint64(memory.ctypes.data)
write = writer.write("peer", address(here), address(there), sizes, b"tag")
failed = {}
tell = "refused(lambda: writer._native.tell('peer', b''))"
for what in ("del write", "write.close()", "write.stop(); del writer, write", "refused(write.poll)", tell, "pass"):
    child = os.fork()
    if not child:
        signal.alarm(20)
        def refused(call):
            try:
                call()
            except ValueError:
                return
            raise AssertionError("not refused")
        exec(what)
        gc.collect()
        sys.exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        failed[what] = code
print(failed)
while not write.poll():
    reader.arrivals()
writer.close()
reader.close()
pool.close()
"""


def test_a_forked_child_does_not_call_nixl() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
