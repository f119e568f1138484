"""Measures what an agent pays for its region, and how fast a reader is.

    python benchmarks/region.py
    python benchmarks/region.py --beside 100      # also while a reader in another process looks 100 times a second

Times are medians of rounds, in µs of the calling thread, whose clock is read once a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl_agent.contract.admin import region_directory
from kvctl_agent.telemetry import engine_calls
from kvctl_agent.telemetry.region import DEFAULT_LOG_BYTES, Cell, Document, Header, RegionReader, RegionWriter

ROUNDS, CALLS = 30, 2000
EVENT = (3, 2**63 + 7, 123_456_789_012_345, "ready", 12, (0, 32), "prefill-0")
"""A record as those of parts: kind, room, time and some fields; 56 bytes of MessagePack."""


def each_us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Returns the median time of a call in µs, less that of the loop."""

    def once(body: Callable[[], object]) -> float:
        began_ns = time.thread_time_ns()
        for _ in range(calls):
            body()
        return (time.thread_time_ns() - began_ns) / calls / 1e3

    return statistics.median(once(call) for _ in range(ROUNDS)) - statistics.median(
        once(lambda: None) for _ in range(ROUNDS)
    )


def writer_rows(writer: RegionWriter) -> list[tuple[str, float]]:
    """Returns what each kind of store costs the agent, in µs."""
    encode = msgspec.msgpack.Encoder().encode
    record, state, peers = encode(EVENT), bytes(2000), bytes(60_000)

    def store() -> None:
        writer.cells[Cell.TURN_NS] = 123_456_789_012_345

    def add() -> None:
        writer.counters[7] += 1.0

    def wait() -> None:
        with writer.call(engine_calls.WAIT):
            pass

    return [
        ("a cell", each_us(store)),
        ("a counter", each_us(add)),
        ("a call of the engine", each_us(lambda: writer.note_call(engine_calls.PAGES))),
        ("a call that may wait", each_us(wait)),
        (f"a record of {len(record)} bytes", each_us(lambda: writer.append(record))),
        ("the same, with MessagePack", each_us(lambda: writer.append(encode(EVENT)))),
        ("a record of 1,000 bytes", each_us(lambda: writer.append(state[:1000]))),
        ("a document of 2,000 bytes", each_us(lambda: writer.publish(Document.STATE, state, 1))),
        ("a document of 60,000 bytes", each_us(lambda: writer.publish(Document.PEERS, peers, 1), 100)),
    ]


def reader_rows(writer: RegionWriter, reader: RegionReader) -> list[tuple[str, float]]:
    """Returns what each look costs a reader, in µs; the last one for each record."""
    encoded, count = msgspec.msgpack.encode(EVENT), 10_000
    rows = [
        ("the cells", each_us(reader.cells)),
        ("a look without news", each_us(reader.records)),
        ("a document of 2,000 bytes", each_us(lambda: reader.document(Document.STATE))),
    ]
    times: list[float] = []
    for _ in range(ROUNDS):
        reader.records()
        for _ in range(count):
            writer.append(encoded)
        began_ns = time.thread_time_ns()
        assert len(reader.records().records) == count
        times.append((time.thread_time_ns() - began_ns) / count / 1e3)
    return [*rows, ("a record", statistics.median(times))]


def created_us(directory: Path) -> float:
    """Returns the time that the creation and the removal of a region take, in µs."""
    header, path = Header.of_this_process("decode", "benchmark"), directory / f"{os.getpid()}-created.region"
    times: list[float] = []
    for _ in range(ROUNDS):
        began_ns = time.perf_counter_ns()
        RegionWriter(header, path).close()
        times.append((time.perf_counter_ns() - began_ns) / 1e3)
    return statistics.median(times)


def watch(path: Path, hz: float) -> None:
    """Runs in the other process: reads everything that is new, `hz` times a second."""
    reader = RegionReader(path)
    print(flush=True)
    while True:
        reader.cells()
        reader.records()
        for document in Document:
            reader.document(document)
        time.sleep(1 / hz)


def show(title: str, rows: list[tuple[str, float]]) -> None:
    print(f"\n{title}, µs")
    for name, value in rows:
        print(f"  {name:<28}{value:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=float, metavar="HZ", help="also beside a reader that looks so often")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch is not None:
        watch(arguments.watch, arguments.beside)
    with tempfile.TemporaryDirectory(dir=region_directory(Path("/tmp")).parent) as name:
        path = Path(name) / "benchmark.region"
        took_us = created_us(Path(name))
        print(f"region with {DEFAULT_LOG_BYTES >> 20} MiB of log in {name}: created and removed in {took_us:.0f} µs")
        writer = RegionWriter(Header.of_this_process("decode", "benchmark"), path)
        reader = RegionReader(path)
        show("writer", writer_rows(writer))
        show("reader", reader_rows(writer, reader))
        if arguments.beside:
            command = [sys.executable, __file__, "--watch", str(path), "--beside", str(arguments.beside)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
                assert other.stdout is not None
                other.stdout.readline()
                show(f"writer, beside a reader of {arguments.beside:g} Hz", writer_rows(writer))
                other.kill()
        reader.close()
        writer.close()


if __name__ == "__main__":
    main()
