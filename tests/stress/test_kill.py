"""A training process that is killed at random instants, in short forms of the program beside this file."""

from __future__ import annotations

import pytest

from stress.kill import stress, table


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_as_the_undisturbed_one(tmp_path):
    """Kill -9 at any time, in epoch two, within accumulation, while saving: the resumed run ends bit-equal."""
    tally = stress(tmp_path, kills=10, seed=3, optimizer="adamw")
    print(table(tally))
    assert tally.problems == []
    assert tally.kills == 10


@pytest.mark.slow
def test_a_run_killed_twenty_five_times_ends_as_the_undisturbed_one(tmp_path):
    tally = stress(tmp_path, kills=25, seed=4)
    print(table(tally))
    assert tally.problems == []
    assert tally.kills == 25
