"""Decides for each forward whether its layers go in groups, counts why, and learns from what that gave."""

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
from kvctl_agent.telemetry.metrics import Metrics

_MOST_DIGITS = 4  # of layers per group


class Pipelining:
    """Of one prefill rank.

    Attributes:
        layers: the rank's layers, by their global ids.
        options: as configured; `set` changes them.
    """

    def __init__(self, layers: range, page_size: int, settings: Any, metrics: Metrics) -> None:
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
        self._pacer = GroupSizeTuner(Random())

    def decide(self, forward: ForwardInfo) -> Grouping:
        """The layer groups of one forward; the reason is counted."""
        grouping = group_layers(self.layers.start, len(self.layers), forward, self.options, self._pacer.choose)
        self._metrics.add("kvctl_pipeline_decisions_total", 1, grouping.reason)
        return grouping

    def set(self, mode: str) -> None:
        """Change the mode while running: off, on, measured, or a number of layers per group.

        Raises:
            ConfigError: anything else.
        """
        if isinstance(mode, str) and mode.isdecimal() and len(mode) <= _MOST_DIGITS and int(mode) > 0:
            self.options = replace(self.options, mode="on", group_size=int(mode))
            return
        for known in PIPELINE_MODES:
            if isinstance(mode, str) and mode == known:
                self.options = replace(self.options, mode=known, group_size=None)
                return
        raise ConfigError(f"pipeline {shown(mode)}: must be {', '.join(PIPELINE_MODES)}, or layers per group")

    def change(self, key: str, value: Any) -> None:
        """Take another value of a configuration key, one of those that begin with `pipeline`."""
        field = "mode" if key == "pipeline" else key.removeprefix("pipeline_")
        self.options = replace(self.options, **{field: value})

    def learn(self, seen: Overlapped) -> None:
        """A pipelined room is sent."""
        tokens = seen.pages * self._page_size
        self._pacer.observe(tokens, seen.groups, seen.compute_ns, seen.transfer_ns, seen.exposed_ns)
