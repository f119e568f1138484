"""Divides the layers of each forward into groups that are sent separately, and tunes the size of the groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from kvctl_agent.contract.choices import PIPELINE_MODES
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import ConfigError
from kvctl_agent.layout.layer_grouping import ForwardInfo, Grouping, GroupingOptions, group_layers
from kvctl_agent.paths.group_size_tuner import GroupSizeTuner
from kvctl_agent.protocol.events import Overlapped
from kvctl_agent.telemetry.metrics import Counters

_MOST_DIGITS = 4  # of layers per group


class Pipelining:
    """Chooses the layer groups of the forwards of one prefill rank.

    Attributes:
        layers: the rank's layers, by their global ids.
        options: configured options; `set` and `change` replace them.
    """

    def __init__(self, layers: range, page_size: int, settings: Any, metrics: Counters) -> None:
        self.layers = layers
        self.options = GroupingOptions(
            mode=settings["pipeline"],
            min_tokens=settings["pipeline_min_tokens"],
            max_iters=settings["pipeline_max_iters"],
            min_iters=settings["pipeline_min_iters"],
            group_size=settings["pipeline_group_size"],
            sat_multiplier=settings["pipeline_sat_multiplier"],
        )
        self._page_size = page_size
        self._metrics = metrics
        self._tuner = GroupSizeTuner(Random())

    def decide(self, forward: ForwardInfo) -> Grouping:
        """Returns the layer groups of one forward, and counts the reason for the decision in the metrics."""
        grouping = group_layers(self.layers.start, len(self.layers), forward, self.options, self._tuner.choose)
        self._metrics.add("kvctl_pipeline_decisions_total", 1, grouping.reason)
        return grouping

    def set(self, mode: str) -> None:
        """Changes the mode; raises ConfigError unless it is off, on, auto, or a number of layers per group."""
        if isinstance(mode, str) and mode.isdecimal() and len(mode) <= _MOST_DIGITS and int(mode) > 0:
            self.options = replace(self.options, mode="on", group_size=int(mode))
            return
        for known in PIPELINE_MODES:
            if isinstance(mode, str) and mode == known:
                self.options = replace(self.options, mode=known, group_size=None)
                return
        raise ConfigError(f"pipeline {shown(mode)}: must be {', '.join(PIPELINE_MODES)}, or layers per group")

    def change(self, key: str, value: Any) -> None:
        """Changes one option; `key` is a configuration key that begins with `pipeline`."""
        field = "mode" if key == "pipeline" else key.removeprefix("pipeline_")
        self.options = replace(self.options, **{field: value})

    def learn(self, sent: Overlapped) -> None:
        """Executes `Overlapped`: passes the times of a room sent in layer groups to the group size tuner."""
        tokens = sent.tokens or sent.pages * self._page_size
        self._tuner.observe(tokens, sent.groups, sent.compute_ns, sent.transfer_ns, sent.exposed_ns)
