"""Where mutes are kept: a file of the user's own, replaced in one step, so that nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import CliError
from kvctl.health.finding import Severity
from kvctl.health.mutes import Baseline, Mute

_VERSION = 1
_MOST_BYTES = 1 << 20


def path() -> Path:
    """`$XDG_STATE_HOME/kvctl/mutes.json`, else `~/.local/state/kvctl/mutes.json`.

    Raises:
        CliError: there is neither a state directory nor a home.
    """
    state = os.environ.get("XDG_STATE_HOME")
    try:
        home = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        raise CliError("this user has no home to keep mutes in: set XDG_STATE_HOME") from None
    return home / "kvctl" / "mutes.json"


def in_force() -> tuple[list[Mute], list[str]]:
    """What the user has muted, and why it cannot be read: then nothing is muted. Without a home nothing is."""
    try:
        file = path()
    except CliError:
        return [], []
    try:
        return load(file), []
    except CliError as error:
        return [], [f"nothing is muted: {error}"]


def load(file: Path) -> list[Mute]:
    """What is muted; nothing where there is no file.

    Raises:
        CliError: the file cannot be read, or is no file of mutes.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CliError(f"{file}: mutes cannot be read: {error.strerror}") from error
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        document = json.loads(text)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, this kvctl knows {_VERSION}")
        return [_mute(row) for row in document["mutes"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CliError(
            f"{file} is no file of mutes ({error or type(error).__name__}): repair it or delete it"
        ) from None


@contextlib.contextmanager
def changing(file: Path) -> Iterator[list[Mute]]:
    """The mutes, to be changed in place; they are written when the block ends well. Two that change wait in turn.

    Raises:
        CliError: the file cannot be read or written.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CliError(f"{file.parent}: mutes cannot be kept there: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        mutes = load(file)
        yield mutes
        _write(file, mutes)
    finally:
        os.close(directory)


def _write(file: Path, mutes: Sequence[Mute]) -> None:
    text = json.dumps({"version": _VERSION, "mutes": [_row(mute) for mute in mutes]}, indent=2) + "\n"
    draft = ""
    try:
        descriptor, draft = tempfile.mkstemp(prefix=".mutes-", dir=file.parent)  # 0600, whatever the umask
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        Path(draft).replace(file)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise CliError(f"{file}: mutes cannot be written: {error.strerror}") from error


def _row(mute: Mute) -> dict[str, Any]:
    worst = mute.baseline
    return {
        "code": mute.code,
        "subject": mute.subject,
        "made_at_ns": mute.made_at_ns,
        "until_ns": mute.until_ns,
        "reason": mute.reason,
        "baseline": worst and {"severity": worst.severity.label, "weight": worst.weight, "count": worst.count},
    }


def _mute(row: Any) -> Mute:
    worst = row["baseline"]
    return Mute(
        code=_text(row["code"]),
        subject=_text(row["subject"]),
        made_at_ns=int(row["made_at_ns"]),
        until_ns=int(row["until_ns"]),
        reason=_text(row["reason"]),
        baseline=worst
        and Baseline(Severity[_text(worst["severity"]).upper()], float(worst["weight"]), int(worst["count"])),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
