"""Breadth-first search: the first history that violates a rule is a shortest one."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.explore.explorer.flow import Budget, Start, State, Step
from tests.explore.explorer.space import Space
from tests.explore.explorer.words import history
from tests.support.protocol.invariants import Broken

_PROGRESS_S = 10.0


class Explored(NamedTuple):
    """Result of a search.

    Attributes:
        depth: the largest number of steps to any state.
        ended: states in which all rooms have ended.
        complete: all states were visited; otherwise the search reached its bound.
    """

    states: int
    edges: int
    depth: int
    ended: int
    seconds: float
    complete: bool

    def __str__(self) -> str:
        rate = self.states / max(self.seconds, 1e-3)
        bounded = "" if self.complete else ", bounded"
        return (
            f"{self.states:>9,} states {self.edges:>10,} edges depth {self.depth:>3} {self.ended:>7,} ended "
            f"{self.seconds:6.1f} s {rate:>7,.0f} states/s{bounded}"
        )


class Bounds(NamedTuple):
    """Limits of a search, and its progress callback."""

    states: int
    seconds: float = float("inf")
    progress: Callable[[str], None] | None = None


class _Graph:
    """The states found so far, numbered in order of discovery, and the step that led to each."""

    def __init__(self, first: State) -> None:
        self.numbers: dict[bytes, int] = {_packed(first): 0}
        self.parents = array("i", [-1])
        self.steps: list[Step | None] = [None]
        self.sources = array("i")  # of the steps that are no faults
        self.targets = array("i")
        self.ended = bytearray(1)

    def path(self, number: int) -> list[Step]:
        found: list[Step] = []
        while (step := self.steps[number]) is not None:
            found.append(step)
            number = self.parents[number]
        return found[::-1]


def explore(start: Start, budget: Budget, bounds: Bounds) -> Explored:
    """Walks every history from a start.

    Raises:
        Broken: a forbidden step, or a state from which the rooms cannot all end, with a shortest history.
    """
    begun = time.monotonic()
    space = Space(start)
    first = space.first(budget)
    graph = _Graph(first)
    layer: list[tuple[int, State]] = [(0, first)]
    edges = depth = 0
    said = begun
    unfinished: list[int] = []
    while layer and not unfinished:
        following: list[tuple[int, State]] = []
        for place, (number, state) in enumerate(layer):
            now = time.monotonic()
            if len(graph.steps) >= bounds.states or now - begun > bounds.seconds:
                unfinished = [number for number, _ in layer[place:]] + [number for number, _ in following]
                break
            if bounds.progress is not None and now - said > _PROGRESS_S:
                said = now
                bounds.progress(f"{len(graph.steps):,} states, depth {depth}, {now - begun:.0f} s")
            edges += _expand(space, graph, number, state, following)
        depth += bool(following)
        layer = following
    _check_liveness(space, graph, unfinished)
    spent = time.monotonic() - begun
    ended = sum(graph.ended)
    return Explored(len(graph.steps), edges, depth, ended, spent, not unfinished)


def _expand(space: Space, graph: _Graph, number: int, state: State, following: list[tuple[int, State]]) -> int:
    if space.is_over(state):
        graph.ended[number] = 1
    edges = 0
    try:
        for step, fault, there in space.after(state):
            edges += 1
            packed = _packed(there)
            known = graph.numbers.get(packed)
            if known is None:
                known = graph.numbers[packed] = len(graph.steps)
                graph.parents.append(number)
                graph.steps.append(step)
                graph.ended.append(0)
                following.append((known, there))
            if not fault:
                graph.sources.append(number)
                graph.targets.append(known)
    except Exception as error:
        steps = [*graph.path(number), space.tried]
        raise Broken(f"{_said(error)}\n{history(space, steps)}") from error
    return edges


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"


def _packed(state: State) -> bytes:
    return array("i", state).tobytes()


def _check_liveness(space: Space, graph: _Graph, unfinished: list[int]) -> None:
    """Check that every state has a fault-free path to a final state; states at the bound are assumed to have one."""
    count = len(graph.steps)
    live: npt.NDArray[np.bool_] = np.frombuffer(bytes(graph.ended), dtype=np.uint8).astype(bool)
    live[unfinished] = True
    sources = np.frombuffer(graph.sources, dtype=np.int32)
    targets = np.frombuffer(graph.targets, dtype=np.int32)
    order = np.argsort(targets, kind="stable")
    by_target = sources[order]
    starts = np.searchsorted(targets[order], np.arange(count + 1))
    frontier = np.flatnonzero(live)
    while len(frontier):
        before = np.concatenate([by_target[starts[number] : starts[number + 1]] for number in frontier.tolist()])
        frontier = np.unique(before[~live[before]])
        live[frontier] = True
    if not live.all():
        stuck = int(np.flatnonzero(~live)[0])
        steps = graph.path(stuck)
        raise Broken(f"the rooms cannot end any more\n{history(space, steps)}")
