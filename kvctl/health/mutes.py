"""Mutes, which hide health findings from the user, and the file that stores them.

A mute stores severity, weight and number of the findings at its creation, and ends when any of them grows. A mute
created without findings holds until it expires.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.client.atomic_file import atomic_file
from kvctl.errors import CliError
from kvctl.health.finding import Finding, Severity

_TOLERANCE = 1.2
"""Weights are measurements: growth by less than a fifth does not count as worse."""
_VERSION = 1
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Baseline:
    """Highest severity, largest weight and number of the findings at the creation of their mute."""

    severity: Severity
    weight: float
    count: int

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Baseline | None:
        """Returns the baseline of findings; None if there are no findings."""
        if not findings:
            return None
        return cls(max(each.severity for each in findings), max(each.weight for each in findings), len(findings))

    def exceeded_by(self, findings: Sequence[Finding]) -> bool:
        return len(findings) > self.count or any(
            each.severity > self.severity or each.weight > self.weight * _TOLERANCE for each in findings
        )


@dataclass(frozen=True, slots=True)
class Mute:
    """A mute, which hides findings of one health code until a given time.

    Attributes:
        subject: subject of the hidden findings, or one of their agents; "" hides all findings of the code.
        made_at_ns, until_ns: creation and expiry on the wall clock.
        baseline: the hidden findings at the creation; None if there were none.
    """

    code: str
    subject: str
    made_at_ns: int
    until_ns: int
    reason: str
    baseline: Baseline | None

    @property
    def target(self) -> str:
        """The mute in the notation of the command line: `CODE` or `CODE:SUBJECT`."""
        return f"{self.code}:{self.subject}" if self.subject else self.code

    def covers(self, finding: Finding) -> bool:
        if finding.code != self.code:
            return False
        return not self.subject or self.subject == finding.subject or self.subject in finding.agents

    def holds(self, findings: Sequence[Finding], now_ns: int) -> bool:
        """Returns whether the mute is still in force: not expired, and `findings`, which it covers, are not worse."""
        return now_ns < self.until_ns and (self.baseline is None or not self.baseline.exceeded_by(findings))


@dataclass(frozen=True, slots=True)
class Judged:
    """Findings separated by mutes, in their original order.

    Attributes:
        raised: findings that no mute covers.
        muted: muted findings, each with the longest of its mutes.
    """

    raised: Sequence[Finding]
    muted: Sequence[tuple[Finding, Mute]]

    def codes_of_agents(self) -> dict[str, list[str]]:
        """Returns the codes of the raised warnings and critical findings by agent, in the order of the findings."""
        found: dict[str, dict[str, None]] = {}
        for finding in self.raised:
            for name in finding.agents if finding.severity > Severity.INFO else ():
                found.setdefault(name, {})[finding.code] = None
        return {name: list(codes) for name, codes in found.items()}


def judge(findings: Iterable[Finding], mutes: Iterable[Mute], now_ns: int) -> Judged:
    """Separates findings that are raised from findings that are muted.

    Args:
        findings: all findings.
        mutes: all mutes; mutes that have expired or ended are ignored.
        now_ns: current time on the wall clock.
    """
    found = list(findings)
    holding = [mute for mute in mutes if mute.holds([each for each in found if mute.covers(each)], now_ns)]
    holding.sort(key=lambda mute: -mute.until_ns)
    pairs = [(each, next((mute for mute in holding if mute.covers(each)), None)) for each in found]
    return Judged(
        [each for each, mute in pairs if mute is None],
        [(each, mute) for each, mute in pairs if mute is not None],
    )


def default_path() -> Path:
    """Returns the path of the user's mutes: `kvctl/mutes.json` in `$XDG_STATE_HOME`, by default `~/.local/state`.

    Raises:
        CliError: there is neither a state directory nor a home directory.
    """
    state = os.environ.get("XDG_STATE_HOME")
    try:
        home = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        raise CliError("this user has no home directory for mutes: set XDG_STATE_HOME") from None
    return home / "kvctl" / "mutes.json"


def load_or_warn() -> tuple[list[Mute], list[str]]:
    """Returns the user's mutes and a list of warnings.

    If the file cannot be read, there are no mutes and one warning; without a home directory, no mutes and no warning.
    """
    try:
        file = default_path()
    except CliError:
        return [], []
    try:
        return load(file), []
    except CliError as error:
        return [], [f"nothing is muted: {error}"]


def load(file: Path) -> list[Mute]:
    """Returns the mutes in a file; [] if the file does not exist.

    Raises:
        CliError: the file cannot be read or has another format.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CliError(f"{file}: mutes cannot be read: {error.strerror}") from error
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        document = json.loads(text)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, this kvctl supports {_VERSION}")
        return [_decode(row) for row in document["mutes"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CliError(
            f"{file} is not a file of mutes ({error or type(error).__name__}): repair it or delete it"
        ) from None


@contextlib.contextmanager
def edit(file: Path) -> Iterator[list[Mute]]:
    """Locks the file and yields its mutes as a list that the caller may change; writes the list back at the end.

    The file stays unchanged if the block raises an exception.

    Raises:
        CliError: the file cannot be read or written.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CliError(f"{file.parent}: mutes cannot be stored there: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        mutes = load(file)
        yield mutes
        _write(file, mutes)
    finally:
        os.close(directory)


def _write(file: Path, mutes: Sequence[Mute]) -> None:
    text = json.dumps({"version": _VERSION, "mutes": [_encode(mute) for mute in mutes]}, indent=2) + "\n"
    try:
        with atomic_file(file) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise CliError(f"{file}: mutes cannot be written: {error.strerror}") from error


def _encode(mute: Mute) -> dict[str, Any]:
    worst = mute.baseline
    return {
        "code": mute.code,
        "subject": mute.subject,
        "made_at_ns": mute.made_at_ns,
        "until_ns": mute.until_ns,
        "reason": mute.reason,
        "baseline": worst and {"severity": worst.severity.label, "weight": worst.weight, "count": worst.count},
    }


def _decode(row: Any) -> Mute:
    worst = row["baseline"]
    return Mute(
        code=_string(row["code"]),
        subject=_string(row["subject"]),
        made_at_ns=int(row["made_at_ns"]),
        until_ns=int(row["until_ns"]),
        reason=_string(row["reason"]),
        baseline=worst
        and Baseline(Severity[_string(worst["severity"]).upper()], float(worst["weight"]), int(worst["count"])),
    )


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
