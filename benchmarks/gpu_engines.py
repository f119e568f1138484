"""Prints the rates of NIXL and Mooncake with GPU memory: one write of few large or many small descriptors.

Usage: python benchmarks/gpu_engines.py [--from GPU] [--to GPU] [--engines nixl,mooncake] [--save FILE]

Each line is the fastest of several writes by kvctl's own transport between two processes, from post to completion.
Source and target slots are in random order, so that no descriptors merge, and every byte is verified. `--self-check`
makes one write with little memory, for one pair of GPUs; `--rehearse` makes it in host memory, without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl_agent.contract.choices import HOST
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError, KvctlError
from kvctl_agent.transport import Region, Transport, open_transport, prepare_environment
from kvctl_agent.transport.cost_probe import interconnect_of
from kvctl_agent.transport.environment import has_infiniband

TOTAL_BYTES = 256 << 20
SMALL_BYTES = 16 << 20
SIZES = (TOTAL_BYTES, 256 << 10, 8 << 10)
REPEATS = 4
ANSWER_S = 60.0
DUTY_S = 0.0005

Bytes = npt.NDArray[np.uint8]


class Cell(NamedTuple):
    """Engine and pair of devices (GPU numbers or HOST) that one pair of processes measures."""

    engine: str
    source: int
    target: int


class Case(NamedTuple):
    """One write: number and size of its descriptors; `seed` determines the order of the slots on both sides."""

    descriptors: int
    nbytes: int
    seed: int


class Memory(Protocol):
    """Registered memory of one process, which writes read or fill."""

    region: Region

    def put(self, data: Bytes) -> None: ...

    def get(self) -> Bytes: ...


class HostMemory:
    """Host memory, for rehearsals."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.zeros(nbytes, np.uint8)
        self.region = Region(self._array.ctypes.data, nbytes)

    def put(self, data: Bytes) -> None:
        self._array[:] = data

    def get(self) -> Bytes:
        return self._array


class GpuMemory:
    """One allocation of GPU memory."""

    def __init__(self, index: int, nbytes: int) -> None:
        self._device = open_device(index)
        self._memory = self._device.allocate(nbytes)
        self.region = Region(self._memory.addr, nbytes, index)

    def put(self, data: Bytes) -> None:
        self._device.upload(self.region.addr, data)

    def get(self) -> Bytes:
        out = np.empty(self.region.nbytes, np.uint8)
        self._device.download(self.region.addr, out)
        return out


def slots(case: Case, side: int) -> npt.NDArray[np.int64]:
    """Returns the order in which the descriptors of a write use the slots of one process (0: source, 1: target)."""
    return np.random.default_rng((case.seed, side)).permutation(case.descriptors)


def noise(nbytes: int) -> Bytes:
    """Returns the bytes that the source contains."""
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


# ---- the two child processes ------------------------------------------------------------------------------------


def serve(wire: Connection, engine: str, index: int, nbytes: int) -> None:
    """Main function of each process: executes the requests from `wire`, and drives the engine between them."""
    try:
        prepare_environment()
        memory: Memory = HostMemory(nbytes) if index == HOST else GpuMemory(index, nbytes)
        transport = open_transport(engine, f"side-{index}", device=None if index == HOST else open_device(index))
        transport.register([memory.region])
        wire.send((transport.metadata(), memory.region.addr))
        side = Side(transport, memory)
        while True:
            while not wire.poll(DUTY_S):
                transport.progress()
            order, *arguments = wire.recv()
            if order == "end":
                break
            wire.send(getattr(side, order)(*arguments))
        transport.close()
    except KvctlError as error:
        wire.send(error)


class Side:
    """Requests that a process executes; the name of a request is that of the method."""

    def __init__(self, transport: Transport, memory: Memory) -> None:
        self._transport, self._memory = transport, memory

    def meet(self, metadata: bytes, there: int) -> None:
        self._transport.connect("target", metadata)
        self._there = there
        self._memory.put(noise(self._memory.region.nbytes))

    def write(self, case: Case, repeats: int) -> float:
        """Returns the duration of the fastest of several writes in seconds."""
        bases = self._memory.region.addr, self._there
        here, there = (
            slots(case, side).astype(np.uint64) * np.uint64(case.nbytes) + np.uint64(base)
            for side, base in enumerate(bases)
        )
        sizes = np.full(case.descriptors, case.nbytes, np.uint64)
        took = []
        for _ in range(repeats + 1):  # the first write establishes the connection
            since = time.perf_counter()
            write = self._transport.write("target", here, there, sizes, None)
            while not write.poll():
                pass
            took.append(time.perf_counter() - since)
        return min(took[1:])

    def clear(self) -> None:
        self._memory.put(np.zeros(self._memory.region.nbytes, np.uint8))

    def holds(self, case: Case) -> bool:
        """Returns whether every byte of the write is in its target slot."""
        shape = case.descriptors, case.nbytes
        wanted = noise(self._memory.region.nbytes).reshape(shape)[slots(case, 0)]
        return bool(np.array_equal(self._memory.get().reshape(shape)[slots(case, 1)], wanted))


# ---- the parent process -----------------------------------------------------------------------------------------


def measure(cell: Cell, total: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Starts two processes and yields one row per case; if they cannot run, yields a row with the reason."""
    spawn = multiprocessing.get_context("spawn")
    wires, processes = [], []
    for index in (cell.source, cell.target):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, cell.engine, index, total), daemon=True)
        process.start()
        theirs.close()
        wires.append(ours)
        processes.append(process)
    writer, target = wires
    named = {"engine": cell.engine, "from": cell.source, "to": cell.target}
    try:
        answer(writer)
        ask(writer, "meet", *answer(target))
        for seed, size in enumerate(min(size, total) for size in SIZES):
            case = Case(total // size, size, seed)
            ask(target, "clear")
            seconds = ask(writer, "write", case, repeats)
            rate = total / seconds / 1e9
            verified = ask(target, "holds", case)
            yield {
                **named,
                "descriptors": case.descriptors,
                "bytes": size,
                "seconds": seconds,
                "gb_per_s": rate,
                "verified": verified,
            }
        for wire in wires:
            wire.send(("end",))
    except KvctlError as error:
        yield {**named, "why_not": str(error)}
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def ask(wire: Connection, *order: Any) -> Any:
    wire.send(order)
    return answer(wire)


def answer(wire: Connection) -> Any:
    """Waits for a process's answer; raises KvctlError if it reports an error, dies or exceeds the deadline."""
    try:
        if not wire.poll(ANSWER_S):
            raise KvctlError(f"no answer within {ANSWER_S:g} s")
        reply = wire.recv()
    except (EOFError, OSError) as error:
        raise KvctlError("its process died") from error
    if isinstance(reply, KvctlError):
        raise reply
    return reply


def named(index: int) -> str:
    return "host" if index == HOST else f"GPU {index}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=int, help="GPU that writes (default 0)", default=0)
    parser.add_argument("--to", dest="target", type=int, help="GPU written to (default: 1, and 0 itself)")
    parser.add_argument("--engines", default="nixl,mooncake", help="joined by commas")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    parser.add_argument("--self-check", action="store_true", help="little memory, once")
    parser.add_argument("--rehearse", action="store_true", help="the same on host memory")
    options = parser.parse_args(arguments)
    try:
        pairs, devices = ([(HOST, HOST)], []) if options.rehearse else gpus(options.source, options.target)
    except DeviceError as error:
        print(f"gpu_engines: {error}", file=sys.stderr)
        return 3
    if options.self_check:
        pairs = pairs[:1]
    small = options.self_check or options.rehearse
    total, repeats = (SMALL_BYTES, 1) if small else (TOTAL_BYTES, REPEATS)
    print(f"{'engine':10}{'from':>7}{'to':>7}{'writes':>9}{'of KiB':>10}{'ms':>10}{'GB/s':>9}  verified")
    rows: list[dict[str, Any]] = []
    for source, target in pairs:
        for engine in options.engines.split(","):
            for row in measure(Cell(engine, source, target), total, repeats):
                rows.append(row)
                print(line(row), flush=True)
    if options.save:
        options.save.write_bytes(
            orjson.dumps({"devices": devices, "rows": rows}, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        )
    return int(not all(row.get("verified") for row in rows))


def gpus(source: int, target: int | None) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """Returns the pairs of GPU numbers to measure, and descriptions of the GPUs.

    Args:
        source: GPU that writes.
        target: GPU that is written to; None measures the source itself and another GPU, if there is one.
    """
    first = open_device(source)
    if target is not None:
        return [(source, target)], [first.describe(), open_device(target).describe()]
    pairs, devices = [(source, source)], [first.describe()]
    other = 1 - source if source < 2 else 0
    try:
        devices.append(open_device(other).describe())
        pairs.insert(0, (source, other))
    except DeviceError as error:
        print(f"GPU {source} to another one: not run: {error}")
    return pairs, devices


def line(row: dict[str, Any]) -> str:
    head = f"{row['engine']:10}{named(row['from']):>7}{named(row['to']):>7}"
    if "why_not" in row:
        return f"{head}  not run: {row['why_not']}"
    kind = ""
    if row["descriptors"] == 1 and row["from"] != HOST:
        kind = f"  ({interconnect_of(row['gb_per_s'], same_host=True, network=has_infiniband()).name})"
    return (
        f"{head}{row['descriptors']:9,}{row['bytes'] / 1024:10,.0f}{row['seconds'] * 1e3:10.2f}{row['gb_per_s']:9.2f}"
        f"  {'yes' if row['verified'] else 'NO'}{kind}"
    )


if __name__ == "__main__":
    sys.exit(main())
