"""NIXL with GPU memory, on a stand-in for its binding: memory kinds of lists, the device of each thread, errors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import TransportError
from kvctl_agent.transport import Region, open_transport
from kvctl_agent.transport.nixl import binding

GPU = Region(0x7000_0000, 1 << 20, 2)
HOSTS = Region(0x1000_0000, 1 << 16, HOST)


class BackendError(Exception):
    pass


class Agent:
    """Records its calls; `said` is the output of UCX on stderr when it rejects a kind of memory."""

    def __init__(self, name: str, log: list[str], refused: dict[str, str]) -> None:
        self.name, self._log, self._refused = name, log, refused
        self.registered: list[Any] = []
        self.posted: list[tuple[Any, Any]] = []
        self.released: list[int] = []

    def registerMem(self, descriptors: Any, backends: list[int]) -> None:
        self._log.append("register")
        if descriptors.kind in self._refused:
            os.write(2, self._refused[descriptors.kind].encode() + b"\n")
            raise BackendError("NIXL_ERR_BACKEND")
        self.registered.append(descriptors)

    def deregisterMem(self, descriptors: Any, backends: list[int]) -> None:
        self.registered.remove(descriptors)

    def getLocalMD(self) -> bytes:
        return self.name.encode()

    def loadRemoteMD(self, body: bytes) -> bytes:
        self._log.append("connect")
        return body

    def makeConnection(self, name: str, backends: list[int]) -> None: ...

    def invalidateRemoteMD(self, name: str) -> None: ...

    def createXferReq(self, operation: Any, here: Any, there: Any, name: str, tag: bytes, backends: list[int]) -> int:
        self.posted.append((here, there))
        return len(self.posted)

    def postXferReq(self, handle: int) -> str:
        self._log.append("post")
        return "in progress"

    def getXferStatus(self, handle: int) -> str:
        self._log.append("poll")
        return "done"

    def releaseXferReq(self, handle: int) -> None:
        self.released.append(handle)

    def getNotifs(self, known: dict[str, Any], backends: list[int]) -> dict[str, list[bytes]]:
        self._log.append("progress")
        return {}


class Rig:
    """Starts transports on the stand-in; `log` has the calls of the engine, each after those of the device."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refused: dict[str, str] = {}
        self.agents: list[Agent] = []

    def start(self, name: str, enter: Any) -> binding.Engine:
        def rows(kind: str, table: np.ndarray) -> Any:
            return SimpleNamespace(kind=kind, rows=table.tolist())

        self.agents.append(Agent(name, self.log, self.refused))
        fake = SimpleNamespace(
            DRAM_SEG="DRAM",
            VRAM_SEG="VRAM",
            NIXL_WRITE="write",
            NIXL_SUCCESS="done",
            NIXL_INIT_AGENT="",
            nixlRegDList=rows,
            nixlXferDList=rows,
        )
        return binding.Engine(fake, self.agents[-1], "1.5.1", (BackendError,), enter)

    def enter(self) -> None:
        self.log.append("enter")

    @contextmanager
    def visit(self) -> Iterator[None]:
        self.log.append("visit")
        yield
        self.log.append("leave")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig()
    monkeypatch.setattr(binding, "start", rig.start)
    monkeypatch.setattr(binding, "add_backend", lambda engine, backend, params: None)
    return rig


def one(addr: int, nbytes: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return np.array([addr], np.uint64), np.array([nbytes], np.uint64)


def test_each_kind_of_memory_is_registered_as_such(rig: Rig) -> None:
    transport = open_transport("nixl", "a", device=rig)
    transport.register([HOSTS, GPU, Region(GPU.addr + GPU.nbytes, 64, 2)])
    agent = rig.agents[0]
    assert [(each.kind, each.rows) for each in agent.registered] == [
        ("DRAM", [[HOSTS.addr, HOSTS.nbytes, 0]]),
        ("VRAM", [[GPU.addr, GPU.nbytes, 2], [GPU.addr + GPU.nbytes, 64, 2]]),
    ]
    transport.close()
    assert agent.registered == []


def test_a_write_names_the_kinds_of_both_sides_as_the_peers_metadata_has_them(rig: Rig) -> None:
    here, there = open_transport("nixl", "a", device=rig), open_transport("nixl", "b", device=rig)
    here.register([GPU, HOSTS])
    theirs = Region(0x1000_0000, 4096, 5), Region(0x2000_0000, 4096, HOST)  # not where ours are
    there.register(theirs)
    here.connect("b", there.metadata())
    size = np.array([64], np.uint64)
    here.write("b", one(GPU.addr)[0], one(theirs[0].addr + 64)[0], size, b"tag").release()
    here.write("b", one(HOSTS.addr)[0], one(theirs[1].addr)[0], size, b"tag").release()
    first, second = rig.agents[0].posted
    assert [(side.kind, side.rows[0][2]) for side in first] == [("VRAM", 2), ("VRAM", 5)]
    assert [(side.kind, side.rows[0][2]) for side in second] == [("DRAM", 0), ("DRAM", 0)]
    both = np.array([GPU.addr, HOSTS.addr], np.uint64)
    with pytest.raises(TransportError, match="this agent's memory mixes memory of the host and GPU 2"):
        here.write("b", both, both, np.array([8, 8], np.uint64), None)
    here.close()
    there.close()


def test_whichever_thread_calls_the_engine_has_the_device_first(rig: Rig) -> None:
    transport = open_transport("nixl", "a", device=rig)
    transport.register([GPU])
    transport.connect("itself", transport.metadata())
    write = transport.write("itself", *one(GPU.addr)[:1], *one(GPU.addr)[:1], np.array([64], np.uint64), None)
    assert write.poll()
    transport.progress()
    # The first two come from whoever embeds us, whose thread keeps its own device.
    assert rig.log[:5] == ["visit", "leave", "visit", "register", "leave"]
    calls = rig.log[5:]
    assert [call for call in calls if call != "enter"] == ["connect", "post", "poll", "progress"]
    assert all(before == "enter" for before, call in pairwise(calls) if call != "enter")
    transport.close()
    assert rig.log[-1] == "leave"


def test_without_a_device_nothing_is_entered(rig: Rig) -> None:
    transport = open_transport("nixl", "a")
    transport.register([HOSTS])
    transport.close()
    assert "enter" not in rig.log


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ibv_reg_mr(address=0x7) failed: Cannot allocate memory", "ulimit -l"),
        ("ibv_reg_mr(address=0x7) failed: Bad address", "nvidia-peermem"),
        ("VRAM memory is detected as host by UCX", "unset UCX_TLS"),
        ("no available backends for mem type 'VRAM'", "nixl-cu13"),
    ],
)
def test_a_refusal_says_the_one_thing_to_do(rig: Rig, said: str, remedy: str, capfd: Any) -> None:
    rig.refused["VRAM"] = said
    transport = open_transport("nixl", "a", device=rig)
    with pytest.raises(TransportError, match=rf"1 regions of GPU 2, 1048576 bytes \(NIXL_ERR_BACKEND\): .*{remedy}"):
        transport.register([HOSTS, GPU])
    assert capfd.readouterr().err.count(said) == 1
    transport.close()
    assert rig.agents[0].registered == []


def test_memory_that_pytorch_made_expandable_is_said_to_be(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    rig.refused["VRAM"] = "ibv_reg_mr() failed: Invalid argument"
    transport = open_transport("nixl", "a", device=rig)
    with pytest.raises(TransportError, match="remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"):
        transport.register([GPU])
    transport.close()


def test_damaged_and_forged_metadata_is_refused(rig: Rig) -> None:
    transport = open_transport("nixl", "a")
    transport.register([GPU, HOSTS])
    metadata = transport.metadata()
    for damaged in (metadata[:-1], metadata[:20] + b"\xff" + metadata[21:], b"kvctl-nixl-1" + metadata[12:]):
        with pytest.raises(TransportError, match="not nixl's or damaged"):
            transport.connect("b", damaged)
    body = b"\xff\xff\xff\xff" + metadata[20:]
    with pytest.raises(TransportError, match="malformed: 4294967295 rows"):
        transport.connect("b", metadata[:12] + zlib.crc32(body).to_bytes(4, "little") + body)
    transport.close()
