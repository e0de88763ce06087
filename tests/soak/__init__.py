"""Long attacks, with counts: ``python -m tests.soak``. The suite has short samples of them."""
