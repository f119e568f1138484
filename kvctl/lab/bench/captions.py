"""The sentences around a bench's table: what was run on what, with which load, and what this machine can do at best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvctl.lab.bench.outcome import Outcome
from kvctl.lab.bench.variants import sizes_text
from kvctl.lab.ranks.plan import Plan, PlannedShape
from kvctl.render import units
from kvctl.render.view import Row


def head(outcome: Outcome) -> list[str]:
    """Layouts, transports and shape."""
    requests = [each.variant.request for each in outcome.measured]
    layouts = dict.fromkeys(
        f"prefill {' + '.join(map(sizes_text, request.prefill))} → decode {sizes_text(request.decode)}"
        for request in requests
    )
    transports = dict.fromkeys(request.transport for request in requests)
    plans: list[Plan] = [each.session.results.plan for each in outcome.measured]
    shapes = dict.fromkeys(shape_text(plan["shape"]) for plan in plans)
    plan = plans[0]
    return [
        f"{' and '.join(layouts)} over {' and '.join(transports)} · {'; then '.join(shapes)} · "
        f"pages of {plan['page_size']}, {plan['page_order']}",
        *_gpus(outcome, plan),
    ]


def _gpus(outcome: Outcome, plan: Plan) -> list[str]:
    """Which side is on which GPU; nothing where KV is in host memory."""
    if plan["device"] == "cpu":
        return []
    names = {number: gpu["name"] for number, gpu in outcome.gpus().items()}
    sides = []
    for role in ("prefill", "decode"):
        used = sorted({rank["device"] for rank in plan["ranks"] if rank["role"] == role})
        sides.append(f"{role} on GPU {' and '.join(map(str, used))}")
    kinds = ", ".join(dict.fromkeys(names.values()))
    line = ", ".join(sides) + (f" ({kinds})" if kinds else "")
    return [line + (", forwards computed for real" if plan["compute"] == "gpu" else "")]


def load(outcome: Outcome, rows: Sequence[Row]) -> list[str]:
    """What ran, where all rows ran the same."""
    if not rows or len({(row["concurrency"], row["tokens_drawn"]) for row in rows}) > 1:
        return []
    row = rows[0]
    line = (
        f"{row['rooms']} rooms of {row['tokens_drawn']} tokens, {units.size(row['bytes_per_room'])} each, "
        f"{row['in_flight']} in flight"
    )
    return [line + (", arriving on their own" if row["arrivals"] == "open" else "")]


def faults(outcome: Outcome, rows: Sequence[Row]) -> list[str]:
    """Which faults were in force, what draws them again, and how often each struck; none where there were none."""
    request = outcome.measured[0].variant.request
    if not request.faults:
        return []
    struck: Counter[str] = Counter()
    for row in rows:
        struck.update(row["faults_struck"])
    how_often = ", ".join(f"{name} {count}" for name, count in struck.items()) or "none"
    return [f"faults {', '.join(request.faults)} with --seed {request.seed}; struck in the agents: {how_often}"]


def floors(outcome: Outcome) -> str:
    """What this machine's memory and transports can do."""
    found = outcome.floors()
    writes = ", ".join(f"over {transport} {_rate(each['write'])} GB/s" for transport, each in found.items())
    copies = f"memcpy {_rate(outcome.best_floor('memcpy'))} GB/s on one thread"
    if outcome.measured[0].session.results.plan["device"] != "cpu":
        within, between = outcome.best_floor("device"), outcome.best_floor("peer")
        copies = f"copy within the GPU {_rate(within)} GB/s, to the decode rank's {_rate(between)} GB/s"
    return f"floors of this machine in the same run: {copies}, one write {writes}"


def cut_short(rows: Sequence[Row]) -> list[str]:
    """Which paths ran fewer rooms than planned because a point's time was up; nothing where none did."""
    cut: dict[str, list[Row]] = {}
    for row in rows:
        if row["rooms"] < row["planned_rooms"]:
            cut.setdefault(row["path"], []).append(row)
    told = [
        f"{path} {units.count(sum(row['rooms'] for row in mine))} of "
        f"{units.count(sum(row['planned_rooms'] for row in mine))} in {len(mine)} run{'s' * (len(mine) > 1)}"
        for path, mine in cut.items()
    ]
    return [f"rooms left out because of --point-seconds: {', '.join(told)} (ROOMS of each is saved)"] if told else []


def observers(rows: Sequence[Row]) -> list[str]:
    """What it cost to be watched; nothing where nobody did."""
    costs = [
        f"{row['path']} {row['observer_cost_ratio']:+.1%}" for row in rows if row["observer_cost_ratio"] is not None
    ]
    if not costs:
        return []
    return [f"throughput taken by kvctl top and kvctl status -w 0.1, median of the pairs: {', '.join(costs)}"]


def shape_text(shape: PlannedShape) -> str:
    """`llama-3.1-8b: 32 layers, 8 KV heads of 128 bf16`."""
    words = [f"{shape['layers']} layers"]
    if shape["kind"] == "mla":
        words.append(f"latents of {shape['head_dim']} {shape['dtype']}")
    else:
        same = shape["head_dim"] == shape["v_head_dim"]
        dims = f"{shape['head_dim']}" if same else f"{shape['head_dim']} and {shape['v_head_dim']}"
        words.append(f"{shape['kv_heads']} KV heads of {dims} {shape['dtype']}")
    if shape["draft"]:
        count = shape["draft"]["layers"]
        words.append(f"{count} draft layer{'s' * (count > 1)}")
    words += [f"state {state['name']}" for state in shape["states"]]
    model = f"{shape['model']}: " if shape["model"] else ""
    return model + ", ".join(words)


def _rate(value: float | None) -> str:
    return units.UNKNOWN if value is None else units.three_digits(value)
