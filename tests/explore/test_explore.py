"""Every history of the small worlds: no byte has two owners, no success has a gap, from anywhere all rooms can end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.explore.configurations import SMALL, Configuration
from tests.explore.explorer.search import Bounds, Explored
from tests.explore.mutations import MUTATIONS, Mutation
from tests.support.sampling import sampled

STATES = 100_000  # that must be explored in all, at least

Explore = Callable[[Configuration], Explored]


@pytest.mark.parametrize("configuration", sampled(SMALL, 12))
def test_every_history_is_safe_and_can_end(configuration: Configuration, explored: Explore) -> None:
    found = explored(configuration)
    assert found.complete
    assert found.ended > 0
    assert found.states > 500


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_breaks_with_a_fault_passes_without_it(mutation: Mutation, explored: Explore) -> None:
    """The configurations of `test_mutations.py`; here, since it is one file that waits for the explorer's processes."""
    assert explored(mutation.configuration).complete


def test_the_small_worlds_have_more_than_a_hundred_thousand_states(
    explored: Explore, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {configuration.name: explored(configuration) for configuration in SMALL}
    states = sum(each.states for each in found.values())
    with capsys.disabled():
        print()
        for name, each in found.items():
            print(f"{name:<52} {each}")
        print(f"{states:,} states in {sum(each.seconds for each in found.values()):.0f} s")
    assert states >= STATES


def test_the_same_configuration_has_the_same_states_each_time(explored: Explore) -> None:
    """Also in another process, whose hashes of strings are others."""
    configuration = min(SMALL, key=lambda each: explored(each).states)
    again = configuration.explore(Bounds(explored(configuration).states + 1))
    assert again._replace(seconds=0) == explored(configuration)._replace(seconds=0)


@pytest.mark.sample
def test_a_search_that_meets_its_bound_says_so() -> None:
    bounded = SMALL[0].explore(Bounds(1000))
    assert not bounded.complete
    assert 1000 <= bounded.states < 1100
    assert "bounded" in str(bounded)
