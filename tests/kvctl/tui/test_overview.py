"""The overview without agents."""

from __future__ import annotations

from kvctl.client.endpoints import Discovery
from kvctl.client.fleet import Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.tui.feed import Question, Reading
from kvctl.tui.panels.overview import no_agents
from kvctl.tui.store import Store
from kvctl_agent.contract.admin import socket_dir


def test_before_the_first_reading_nobody_is_said_to_be_silent() -> None:
    store = Store()
    assert no_agents(store)[0] == "connecting …"
    question = Question("overview", HEALTH_CALLS)
    store.take(Reading(question, 1, Survey(Discovery(socket_dir()))))
    assert no_agents(store)[0] == "no agent answers"


def test_a_source_that_cannot_be_read_is_not_waited_for() -> None:
    store = Store()
    store.take(Reading(Question("overview", HEALTH_CALLS), 1, None, "the file is cut short"))
    assert no_agents(store)[0] == "no agent answers"
