"""The Grafana dashboard as data; `docs/render.py` writes it to `docs/grafana/kvctl.json` and into the Helm chart.

The former file is for people who import it: Grafana asks for the data source that stands in `__inputs`. The latter is
provisioned from a ConfigMap, where nobody is asked: the data source is a variable of the dashboard.

Quantiles over several ranks are computed from their summed buckets. Rooms are counted on decode ranks, where each room
has one row; bytes are those that landed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH = 24
_HEIGHT = 8
_HERE = 'namespace=~"$namespace",host=~"$host",instance=~"$instance",agent=~"$agent"'
_DECODE = f'role="decode",{_HERE}'
_PREFILL = f'role="prefill",{_HERE}'
_RATE = "[$__rate_interval]"
_VARIABLE, _INPUT = "${datasource}", "${DS_PROMETHEUS}"  # uid of the data source, provisioned and imported
_DATASOURCE = {"type": "prometheus", "uid": _VARIABLE}
_GRAFANA = "11.6.0"  # against whose schema the tests check the dashboard
_PANELS = {"stat": "Stat", "timeseries": "Time series"}
# Name, which is a label of every metric, heading and selector. `instance` is what Prometheus scrapes, address:port;
# `namespace` comes from discovery in Kubernetes and is absent elsewhere, where All (.*) matches nevertheless.
_VARIABLES = (
    ("namespace", "Namespace", ""),
    ("host", "Host", '{namespace=~"$namespace"}'),
    ("instance", "Instance", '{namespace=~"$namespace",host=~"$host"}'),
    ("agent", "Agent", '{namespace=~"$namespace",host=~"$host",instance=~"$instance"}'),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: `queries` are (expression, legend); units are Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None


def _rate(metric: str, where: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}{_RATE}))"


def _quantile(quantile: float, metric: str, where: str, by: str = "") -> str:
    return f"histogram_quantile({quantile}, sum by (le{by}) (rate({metric}_bucket{{{where}}}{_RATE})))"


def _mean(metric: str, where: str, by: str) -> str:
    return f"{_rate(f'{metric}_sum', where, by)} / {_rate(f'{metric}_count', where, by)}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Fleet",
        (
            Panel(
                "Agents",
                "none",
                ((f"count by (role) (kvctl_rooms_opened_total{{{_HERE}}})", "{{role}}"),),
                "Agents that Prometheus reaches.",
                kind="stat",
                width=4,
            ),
            Panel(
                "Landed",
                "Bps",
                ((f"sum(rate(kvctl_part_bytes_total{{{_DECODE}}}{_RATE}))", "bytes"),),
                "KV bytes that landed on decode ranks, over wall-clock time.",
                kind="stat",
                width=5,
            ),
            Panel(
                "Rooms done",
                "reqps",
                ((_rate("kvctl_rooms_finished_total", f'{_DECODE},result="Success"', "result"), "done"),),
                kind="stat",
                width=5,
            ),
            Panel(
                "Rooms failed",
                "reqps",
                (
                    (
                        f'sum(rate(kvctl_rooms_finished_total{{{_DECODE},result="Failed"}}{_RATE})) or vector(0)',
                        "failed",
                    ),
                ),
                kind="stat",
                width=5,
            ),
            Panel(
                "Room, p99",
                "s",
                ((_quantile(0.99, "kvctl_room_seconds", _DECODE), "p99"),),
                "Open to success, on decode ranks.",
                kind="stat",
                width=5,
            ),
        ),
    ),
    (
        "Rooms",
        (
            Panel(
                "Active, by state",
                "none",
                ((f"sum by (state) (kvctl_rooms_active{{{_DECODE}}})", "{{state}}"),),
                stacked=True,
            ),
            Panel(
                "Open to success",
                "s",
                tuple((_quantile(at, "kvctl_room_seconds", _DECODE), f"p{at * 100:g}") for at in (0.5, 0.9, 0.99)),
            ),
            Panel(
                "Failures, by first cause", "reqps", ((_rate("kvctl_room_failures_total", _HERE, "code"), "{{code}}"),)
            ),
        ),
    ),
    (
        "Staging",
        (
            Panel(
                "Ring in use",
                "percentunit",
                ((f"kvctl_ring_used_bytes{{{_HERE}}} / kvctl_ring_size_bytes{{{_HERE}}}", "{{agent}} on {{host}}"),),
                most=1,
            ),
            Panel(
                "Parts that wait for a grant or the watermark",
                "none",
                ((f"kvctl_parts_parked{{{_PREFILL}}}", "{{agent}} on {{host}}"),),
            ),
            Panel(
                "Quarantined",
                "bytes",
                ((f"kvctl_quarantined_bytes{{{_HERE}}}", "{{agent}} on {{host}}"),),
                "Memory kept from reuse because a write may be in flight.",
            ),
            Panel(
                "Grants, revokes, refusals",
                "ops",
                tuple(
                    (f"sum(rate(kvctl_ring_{name}_total{{{_HERE}}}{_RATE}))", name)
                    for name in ("grants", "revokes", "refusals")
                ),
                width=12,
            ),
            Panel(
                "Parts that took another path",
                "ops",
                ((_rate("kvctl_fallbacks_total", _HERE, "reason"), "{{reason}}"),),
                width=12,
            ),
        ),
    ),
    (
        "Where the time goes",
        (
            Panel(
                "A part's mean time in each stage",
                "s",
                ((_mean("kvctl_stage_seconds", _HERE, "stage"), "{{stage}}"),),
                stacked=True,
                width=12,
            ),
            Panel(
                "Transfer of a room: hidden behind its forward, and exposed",
                "s",
                tuple(
                    (
                        f"sum(rate(kvctl_transfer_{name}_seconds_sum{{{_PREFILL}}}{_RATE}))"
                        f" / sum(rate(kvctl_transfer_{name}_seconds_count{{{_PREFILL}}}{_RATE}))",
                        name,
                    )
                    for name in ("hidden", "exposed")
                ),
                stacked=True,
            ),
            Panel(
                "Forwards, by how their layers were cut",
                "ops",
                ((_rate("kvctl_pipeline_decisions_total", _PREFILL, "reason"), "{{reason}}"),),
                width=4,
            ),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "Landed, by path",
                "Bps",
                ((_rate("kvctl_part_bytes_total", _DECODE, "path"), "{{path}}"),),
                stacked=True,
            ),
            Panel(
                "Bytes per descriptor",
                "bytes",
                (
                    (
                        f"{_rate('kvctl_part_bytes_total', _PREFILL, 'path')}"
                        f" / {_rate('kvctl_descriptors_total', _PREFILL, 'path')}",
                        "{{path}}",
                    ),
                ),
                "Small ones cost the engine more than the bytes do.",
            ),
            Panel(
                "Errors",
                "ops",
                ((_rate("kvctl_transport_errors_total", _HERE, "agent, host"), "{{agent}} on {{host}}"),),
            ),
        ),
    ),
    (
        "Peers and control",
        (
            Panel(
                "Peers, by state", "none", ((f"sum by (state) (kvctl_peers{{{_HERE}}})", "{{state}}"),), stacked=True
            ),
            Panel(
                "Control messages sent again",
                "ops",
                ((_rate("kvctl_control_resends_total", _HERE, "type"), "{{type}}"),),
            ),
            Panel(
                "Messages and tags that changed nothing",
                "ops",
                (
                    (_rate("kvctl_control_dropped_total", _HERE, "reason"), "message: {{reason}}"),
                    (_rate("kvctl_tags_dropped_total", _HERE, "reason"), "tag: {{reason}}"),
                ),
            ),
        ),
    ),
)


def imported() -> dict[str, Any]:
    """Returns the dashboard in Grafana's format for import, as "Export for sharing externally" writes it."""
    board: dict[str, Any] = json.loads(json.dumps(provisioned()).replace(_VARIABLE, _INPUT))
    board["templating"]["list"] = [each for each in board["templating"]["list"] if each["type"] != "datasource"]
    source = {"type": "datasource", "pluginId": "prometheus", "pluginName": "Prometheus"}
    kinds = sorted({panel.kind for _, row in ROWS for panel in row})
    return {
        "__inputs": [{"name": _INPUT[2:-1], "label": "Prometheus", "description": "Scrapes the agents.", **source}],
        "__elements": {},
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": _GRAFANA},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
            *({"type": "panel", "id": kind, "name": _PANELS[kind], "version": ""} for kind in kinds),
        ],
        "id": None,
        **board,
    }


def provisioned() -> dict[str, Any]:
    """Returns the dashboard as Grafana reads it from a file, with a variable for the data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            _placed(len(panels), {"type": "row", "title": title, "collapsed": False, "panels": []}, 0, y, 24, 1)
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y = 0, y + _HEIGHT
            height = _HEIGHT // 2 if panel.kind == "stat" else _HEIGHT
            panels.append(_placed(len(panels), _panel(panel), x, y, panel.width, height))
            x += panel.width
        y += _HEIGHT // 2 if row[0].kind == "stat" else _HEIGHT
    return {
        "title": "kvctl",
        "uid": "kvctl",
        "description": "KV-cache transfer between prefill and decode ranks.",
        "tags": ["kvctl", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), *(_variable(*each) for each in _VARIABLES)]},
        "panels": panels,
    }


def expressions() -> list[str]:
    """Returns every query of the dashboard."""
    return [query for _, row in ROWS for panel in row for query, _ in panel.queries]


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, label: str, where: str) -> dict[str, Any]:
    """Returns a variable that selects values of a label of all agents; `where` limits them by earlier variables."""
    query = f"label_values(kvctl_rooms_opened_total{where}, {name})"
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(number: int, panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **panel}


def _panel(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 25 if panel.stacked else 8, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    bounds = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "targets": _targets(panel.queries),
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **bounds, **({} if panel.kind == "stat" else {"custom": custom})},
            "overrides": [],
        },
    }


def _targets(queries: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": _DATASOURCE}
        for place, (query, legend) in enumerate(queries)
    ]
