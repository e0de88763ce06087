"""Writes that fail: an error that names the file, nothing left behind, the same bytes next time."""

from __future__ import annotations

import os
import shutil

import pytest

from ..soak.operations import FAULTS, Faults


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_cache_survives_a_fault_at_any_call(example, tmp_path, compression) -> None:
    """The long form, for every command, is ``python -m tests.soak faults``."""
    made = example([3, 9, 4], compression=compression)
    whole, attacked = tmp_path / "whole", tmp_path / "attacked"
    counter = Faults(whole)
    with counter.installed():
        made.write(whole)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    for fault, number in FAULTS.items():
        for at in range(1, len(counter.calls) + 1, 5 if number else 2):
            faults = Faults(attacked, at, number)
            shutil.rmtree(attacked, ignore_errors=True)
            if not number:  # a write that takes a part is gone on with
                with faults.installed():
                    made.write(attacked)
            else:
                with pytest.raises(OSError, match=os.strerror(number)) as error, faults.installed():
                    made.write(attacked)
                assert error.value.filename, f"{fault} at {at}"
                made.write(attacked)
            assert {p.name: p.read_bytes() for p in attacked.iterdir()} == expected
