"""`kvctl nics`: prints the network devices of the agents' hosts, their rates, faults, and the ranks that use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.health_query import earlier
from kvctl.commands.options import command
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.nics import NICS, nic_rows
from kvctl.render.report import Report

_CALLS = (Call("nics"),)


@command(
    view=NICS,
    examples=[
        ("All network devices of all hosts", "kvctl nics"),
        ("One host, every second", "kvctl nics -l host=node-3 -w 1"),
        ("RDMA ports only, with GIDs and all counters", "kvctl nics --filter kind=rdma -o wide"),
    ],
)
def nics(settings: Settings) -> None:
    """Network devices of the agents' hosts: state, speed, rate, faults, and the ranks that use them.

    The agents read /sys of their hosts, twice, a second apart, for the rates; with -w each reading is compared with the
    one before. Counters are those of the host: other processes' bytes are included. Which devices a rank uses is told
    by its engine (Mooncake), else by the devices that its process has open or by its settings (UCX_NET_DEVICES), else
    by the routes to its peers: column source, with -o wide.
    """
    first = earlier(settings, _CALLS)
    before: list[Any] = [] if first is None else _answers(first.survey)

    def read(survey: Survey) -> Report:
        answers = _answers(survey)
        rows = nic_rows(answers, before)
        before[:] = answers
        return Report(NICS, rows, len(answers), survey.faults, notes=_left_out(answers))

    run(settings, NICS, _CALLS, read)


def _answers(survey: Survey) -> list[Any]:
    return [data for _, data in survey.answers("nics")]


def _left_out(answers: Sequence[Any]) -> list[str]:
    return sorted(
        {f"{each['host']}: {each['left_out']} more devices are not shown" for each in answers if each["left_out"]}
    )
