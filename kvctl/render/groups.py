"""Groups the ranks of a fleet by host, instance or role, with totals, and tells which groups and ranks are odd.

A rank is odd if it does not answer, has ended, drains, waits, has findings, has another version or other settings than
most ranks of its role, or transfers at less than a third of the median rate of ranks with its role and sizes. A group
is odd if it has odd ranks, or is an instance of which ranks are missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

from kvctl.client.instances import instances
from kvctl.client.names import natural_key, replaced_by
from kvctl.render.report import Grid
from kvctl.render.status import GROUPS, Totals, device_kind, runs
from kvctl.render.view import Row

_SLOW = 3.0
# With fewer ranks, a median says little.
_MIN_RATES = 4
# Lines of a table that fits a screen.
_MAX_ODD = 12
_MAX_EVEN = 12
_MAX_RANKS = 8
_BELOW = "└ "
FOLD_ABOVE = 32
"""Number of agents above which they are folded into groups, unless the user chooses otherwise."""


class By(StrEnum):
    """What ranks of a group have in common."""

    HOST = "host"
    INSTANCE = "instance"
    ROLE = "role"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks with one host, instance or role.

    Attributes:
        name: name of the host, of the instance, or the role.
        silent: rows of agents that have ended, and of those that did not answer, which have only name, host and health.
        missing: number of ranks of the group's instances of which no agent is known.
        oddities: why each odd agent is odd, by name.
    """

    by: By
    name: str
    ranks: Sequence[Row]
    silent: Sequence[Row]
    missing: int
    oddities: Mapping[str, Sequence[str]]
    totals: Totals

    @property
    def odd(self) -> bool:
        return bool(self.oddities) or self.missing > 0

    @property
    def place(self) -> str:
        """Name of the host; the number of hosts if there are several."""
        hosts = {row.get("host") or "" for row in (*self.ranks, *self.silent)}
        return hosts.pop() if len(hosts) == 1 else f"{len(hosts)} hosts"

    @property
    def up(self) -> str:
        """Number of agents that answered, of those that are known or missing."""
        return f"{len(self.ranks)} of {len(self.ranks) + len(self.silent) + self.missing}"

    @property
    def instances(self) -> list[str]:
        return sorted({row["instance"] for row in self.ranks}, key=natural_key)

    @property
    def roles(self) -> list[str]:
        """Roles of the ranks, prefill first."""
        return sorted({row["role"] for row in self.ranks}, reverse=True)

    @property
    def role(self) -> str | None:
        return " ".join(self.roles) or None

    @property
    def health(self) -> str:
        """Why the group is odd; "ok" if it is not."""
        return ", ".join(self.reasons) or "ok"

    @property
    def reasons(self) -> list[str]:
        """Why the group is odd, most frequent reason first: `3 silent`, `KV_LANE_SLOW`, `1 missing`."""
        counts = Counter(reason for reasons in self.oddities.values() for reason in reasons)
        whole = len(self.ranks) + len(self.silent)
        found = [
            reason if number == whole else f"{number} {reason}" if reason in _ABSENT else f"{reason} ({number})"
            for reason, number in counts.most_common()
        ]
        return [f"{self.missing} missing"] * (self.missing > 0) + found


Sizes = tuple[tuple[str, int], ...]

SILENT = "silent"
"""Oddity of an agent that does not answer."""
ENDED = "ended"
"""Oddity of an agent whose process has ended, and of which its observer keeps what it left."""
_ABSENT = frozenset({SILENT, ENDED})


def placed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of answers to `status` with the name of each rank's instance; other rows unchanged."""
    ranks = [row for row in rows if "rank" in row]
    names = iter(instances(ranks))
    return [{**row, "instance": next(names)} if "rank" in row else dict(row) for row in rows]


def groups(rows: Sequence[Row], by: By) -> list[Group]:
    """Groups rows that `placed` returned; odd groups come first, of those the ones with silent agents.

    Agents that did not answer have no known role or instance. They form groups by their hosts, unless `by` is host.

    Args:
        rows: answers to `status`, each with `instance` and `health`, the codes of its findings; and for each agent that
            did not answer a row with `name`, `host` and `health`.
    """
    odd = oddities(rows)
    members: dict[tuple[By, str], list[Row]] = {}
    for row in rows:
        key = (By.HOST, row.get("host") or "") if by is By.HOST or "rank" not in row else (by, row[by.value])
        members.setdefault(key, []).append(row)
    found = [_group(kind, name, ranks, odd) for (kind, name), ranks in members.items()]
    return sorted(found, key=lambda group: (not group.odd, not group.silent, natural_key(group.name)))


def _group(by: By, name: str, members: Sequence[Row], odd: Mapping[str, Sequence[str]]) -> Group:
    ranks = [row for row in members if runs(row)]
    known = [row for row in members if "rank" in row and not replaced_by(row["name"])]
    missing = 0 if by is By.HOST else sum(_missing(known).values())
    reasons = {row["name"]: odd[row["name"]] for row in members if row["name"] in odd}
    silent = [row for row in members if not runs(row)]
    return Group(by, name, ranks, silent, missing, reasons, Totals(ranks))


def _missing(ranks: Iterable[Row]) -> dict[str, int]:
    """Returns the number of ranks that each instance lacks, by its name."""
    seen: dict[str, set[int]] = {}
    whole: dict[str, int] = {}
    for row in ranks:
        seen.setdefault(row["instance"], set()).add(row["rank"]["unique"])
        whole[row["instance"]] = prod(row["sizes"].values())
    return {name: max(0, whole[name] - len(found)) for name, found in seen.items()}


def oddities(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Returns why each odd agent is odd, by name; rows as for `groups`."""
    found = {row["name"]: [ENDED if "rank" in row else SILENT] for row in rows if not runs(row)}
    for role in ("prefill", "decode"):
        ranks = [row for row in rows if row.get("role") == role and runs(row)]
        differing = _differences(ranks)
        slow = _slow_below(ranks)
        for row in ranks:
            reasons = [*row["health"]]
            if row.get("draining") and "KV_DRAINING" not in reasons:
                reasons.append("draining")
            if row.get("waiting_for"):
                reasons.append("waiting")
            reasons += differing.get(row["name"], ())
            rate = row["rate"]["gb_per_s"]
            if rate is not None and rate < slow[_sizes(row)]:
                reasons.append("slow")
            if reasons:
                found[row["name"]] = reasons
    return found


_FACTORS: Mapping[str, Callable[[Row], Any]] = {
    "version": lambda row: row["version"],
    "transport": lambda row: row["transport"].get("engine"),
    "backend": lambda row: row["transport"].get("backend"),
    "device": lambda row: device_kind(row["device"]),
    "page_size": lambda row: row["pool"].get("page_size"),
    "layer pipelining": lambda row: (row.get("pipeline") or {}).get("mode"),
    "engine": lambda row: (row.get("integration") or {}).get("engine_version"),
}
"""Settings that ranks of one role usually have in common."""


def _differences(ranks: Sequence[Row]) -> dict[str, list[str]]:
    """Returns the settings in which ranks of one role differ from most others, by name of the rank."""
    found: dict[str, list[str]] = {}
    for name, read in _FACTORS.items():
        values = [read(row) for row in ranks]
        usual = _majority(values)
        if usual is None:
            continue
        for row, value in zip(ranks, values, strict=True):
            if value != usual:
                found.setdefault(row["name"], []).append(f"{name} {'none' if value is None else value}")
    return found


def _majority(values: Iterable[Any]) -> Any:
    """Returns the value that more than half of the ranks have; None if there is none."""
    counts = Counter(values)
    value, number = counts.most_common(1)[0] if counts else (None, 0)
    return value if number * 2 > counts.total() else None


def _slow_below(ranks: Sequence[Row]) -> dict[Sizes, float]:
    """Returns the rate in GB/s below which a rank is slow, by the sizes of its instance; 0 with too few rates."""
    rates: dict[Sizes, list[float]] = {}
    for row in ranks:
        if (rate := row["rate"]["gb_per_s"]) is not None:
            rates.setdefault(_sizes(row), []).append(rate)
    return {
        sizes: sorted(found)[len(found) // 2] / _SLOW if len(found) >= _MIN_RATES else 0.0
        for sizes, found in rates.items()
    }


def _sizes(row: Row) -> Sizes:
    return tuple(row["sizes"].items())


# ---- tables ----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], by: By | None) -> Grid:
    """Returns the table of groups for `kvctl status`; rows as for `groups`.

    Args:
        by: what to group by; None to list the odd instances and hosts, and to fold the others as far as necessary.
    """
    if by is not None:
        return Grid(GROUPS, [line for group in groups(rows, by) for line in _lines(group)])
    found = groups(rows, By.INSTANCE)
    odd = [group for group in found if group.odd]
    lines = [line for group in odd for line in _lines(group)] if len(odd) <= _MAX_ODD else _merged(odd)
    return Grid(GROUPS, [*lines, *_folded([group for group in found if not group.odd])])


def outline(rows: Sequence[Row], unfolded: Collection[str]) -> list[Row]:
    """Returns the rows of GROUPS for `kvctl top`: a line per instance, the odd ones first, with odd agents below it.

    Instances in `unfolded` have lines of all their agents. A line has `name` of its agent, or `fold` of its group, by
    which it is in `unfolded`. Other arguments as for `groups`.
    """
    lines: list[Row] = []
    for group in groups(rows, By.INSTANCE):
        fold = f"{group.by.value} {group.name}"
        if fold in unfolded:
            members = sorted((*group.ranks, *group.silent), key=lambda row: natural_key(row["name"]))
            below = [_rank_line(row, group.oddities.get(row["name"], ())) for row in members]
            head = _line(group)
        else:
            head, *below = _lines(group)
        lines += [{**head, "fold": fold}, *({"fold": fold, **line} if "name" not in line else line for line in below)]
    return lines


def _folded(even: Sequence[Group]) -> list[Row]:
    """Returns lines for groups that are not odd: of each, or else of each host, or else of each role and size."""
    if len(even) <= _MAX_EVEN:
        return [_line(group) for group in even]
    rows = [row for group in even for row in group.ranks]
    if len({row.get("host") for row in rows}) <= _MAX_EVEN:
        return [_line(group) for group in groups(rows, By.HOST)]
    shapes: dict[tuple[str, Sizes], list[Row]] = {}
    for row in rows:
        shapes.setdefault((row["role"], _sizes(row)), []).append(row)
    found = []
    for (role, sizes), ranks in sorted(shapes.items(), reverse=True):
        shape = " ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one rank each"
        group = _group(By.ROLE, role, ranks, {})
        found.append(_line(group, f"{len(group.instances)} instance{'s' * (len(group.instances) != 1)}, {shape}"))
    return found


def _merged(odd: Sequence[Group]) -> list[Row]:
    """Returns one line for the groups of each kind that are odd for the same reasons, most groups first."""
    alike: dict[tuple[By, str, tuple[str, ...]], list[Group]] = {}
    for group in odd:
        alike.setdefault((group.by, " ".join(group.roles), tuple(group.reasons)), []).append(group)
    lines = []
    for (by, _, reasons), same in sorted(alike.items(), key=lambda each: -len(each[1])):
        if len(same) == 1:
            lines.append(_line(same[0]))
            continue
        rows = [row for group in same for row in (*group.ranks, *group.silent)]
        each = {name: found for group in same for name, found in group.oddities.items()}
        whole = _group(by, "", rows, each)
        names = f"{same[0].name}, {same[1].name}" + (f" and {len(same) - 2} more" if len(same) > 2 else "")
        lines.append({**_line(whole, names), "health": ", ".join(reasons) + " each"})
    hidden = lines[_MAX_ODD:]
    return [*lines[:_MAX_ODD], *([{"group": f"and {len(hidden)} more (--by instance)"}] if hidden else [])]


def _lines(group: Group) -> list[Row]:
    """Returns the line of a group and, unless all of its agents are odd for the same reasons, those of odd agents."""
    if not group.oddities:
        return [_line(group)]
    members = (*group.ranks, *group.silent)
    if len(group.oddities) == len(members) and len({tuple(each) for each in group.oddities.values()}) == 1:
        return [_line(group)]
    odd = sorted(
        (row for row in members if row["name"] in group.oddities),
        key=lambda row: (_ABSENT.isdisjoint(group.oddities[row["name"]]), natural_key(row["name"])),
    )
    shown = odd if len(odd) <= _MAX_RANKS else odd[: _MAX_RANKS - 1]
    lines = [_line(group), *(_rank_line(row, group.oddities[row["name"]]) for row in shown)]
    if len(shown) < len(odd):
        lines.append({"group": f"{_BELOW}{len(odd) - len(shown)} more (--by agent)"})
    return lines


def _line(group: Group, name: str = "") -> Row:
    """Returns the line of a group, whose values are computed when they are shown."""
    return {
        "group": name or (f"host {group.name}" if group.by is By.HOST else group.name),
        "of": group,
        "totals": group.totals,
    }


def _rank_line(row: Row, reasons: Sequence[str]) -> Row:
    return {
        "group": f"{_BELOW}{row['name']}",
        "name": row["name"],
        "role": row.get("role"),
        "place": row.get("host"),
        "health": ", ".join([*reasons, *row["health"]] if _ABSENT & {*reasons} else reasons) or "ok",
        "totals": Totals([row] if runs(row) else ()),
    }
