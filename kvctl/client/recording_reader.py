"""Reads the moments of a recording or of a debug bundle; decodes only those that are looked at.

A file may come from anywhere, so nothing in it is believed: sizes are bounded before anything is unpacked, and no byte
of it is written to disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO

from kvctl.client import bundle_reader
from kvctl.client.fleet_snapshot import FleetSnapshot, decode
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.recording import RecordingError, RecordingVersionError

_MOST_KEPT_BYTES = 512 << 20  # of moments; machine inputs beside them are passed over
_DECODED_MOMENTS = 3


@dataclass(slots=True)
class _Packed:
    at_ns: int
    body: bytes
    expected: int
    agents: list[bytes] = field(default_factory=list)


class SnapshotReader:
    """The moments of a file, in their order."""

    def __init__(self, path: Path, packed: list[_Packed]) -> None:
        self._path = path
        self._packed = packed
        self.at_ns = [each.at_ns for each in packed]
        self._decoded = lru_cache(_DECODED_MOMENTS)(self._decode)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> FleetSnapshot:
        """Raises CliError where the moment is damaged."""
        return self._decoded(index)

    def _decode(self, index: int) -> FleetSnapshot:
        packed = self._packed[index]
        with readable(self._path):
            return decode(packed.at_ns, packed.body, packed.agents)


def load(path: Path) -> SnapshotReader:
    """The moments of a recording, or of the one in a bundle.

    Raises:
        CliError: it cannot be read (exit 1), not by us (5), is of another version (6), or holds no moment (1).
    """
    with readable(path), path.open("rb") as file:
        if bundle_reader.is_bundle(file):
            with bundle_reader.recording(file) as inner:
                packed = _moments(inner)
        else:
            packed = _moments(file)
    if not packed:
        raise CliError(
            f"{path}: it holds machine inputs only and no moment of a fleet: kvctl replay reads it; "
            "kvctl record of this version saves both"
        )
    return SnapshotReader(path, packed)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what is wrong with a file into one line and its exit code."""
    try:
        yield
    except RecordingVersionError as error:
        raise CliError(f"{path}: {error}", ExitCode.PROTOCOL) from None
    except RecordingError as error:
        raise CliError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CliError(f"{path}: there is no such file", ExitCode.USAGE) from None
    except PermissionError:
        raise CliError(f"{path}: you may not read it", ExitCode.NOT_PERMITTED) from None
    except OSError as error:
        raise CliError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turns what is wrong with answers into one line: they are another version's, or a stranger's."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        text = f"{path}: it does not hold what this kvctl reads: {type(error).__name__} {error}"
        raise CliError(text, ExitCode.PROTOCOL) from error


def _moments(file: IO[bytes]) -> list[_Packed]:
    found: list[_Packed] = []
    kept = 0
    for kind, about, body in form.read_frames(file):
        if kind not in {form.MOMENT, form.ANSWERS}:
            continue
        kept += len(body)
        if kept > _MOST_KEPT_BYTES:
            raise RecordingError(f"its moments have more than {_MOST_KEPT_BYTES >> 20} MiB, more than kvctl writes")
        if about.get("moment") != len(found) - (kind == form.ANSWERS):
            raise RecordingError("it is damaged: its moments do not follow each other")
        if kind == form.ANSWERS:
            found[-1].agents.append(body)
            continue
        version, at_ns, expected = about.get("form"), about.get("at_ns"), about.get("agents")
        if version != form.MOMENT_VERSION:
            raise RecordingVersionError(
                f"its moments are of version {version!r:.20}, this kvctl reads version {form.MOMENT_VERSION}: "
                "read it with the kvctl that made it"
            )
        if type(at_ns) is not int or type(expected) is not int or not 0 <= at_ns < 1 << 63:
            raise RecordingError("it is damaged: a moment does not say when it was")
        found.append(_Packed(at_ns, body, expected))
    if any(len(each.agents) != each.expected for each in found):
        raise RecordingError("it is damaged: agents are missing in a moment")
    return found
