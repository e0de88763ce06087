"""The entry point: what has to be so before anything is imported that takes its time."""

from __future__ import annotations

import os

from .interrupts import handle_interrupts


def main() -> None:
    """Run the command line."""
    handle_interrupts()
    # Threads of OpenMP wait by spinning. On a machine with other things to do each then waits for
    # one that is not running, and small batches take ten times as long; threads that sleep at once
    # double the time on a quiet machine. So they spin for a moment. Read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from .app import app

    app()
