"""No history of the zoo is wrong: each is the one by hand, or refused with a useful line."""

from __future__ import annotations

import pytest

from .zoo import ENTRIES, Entry, examine


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_history_is_the_one_by_hand_or_refused(entry: Entry):
    outcome = examine(entry)
    assert outcome.result != "wrong", outcome.line
    assert outcome.as_expected, f"{outcome.result}, expected {entry.expected}: {outcome.line}"


def test_names_are_unique():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
