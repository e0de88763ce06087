"""What is said of a cache before it is written."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from histograph_post.caches.planning import estimate_seconds, plan_cache
from histograph_post.data import load_data
from histograph_post.models import build_model
from histograph_post.splits import resolve_splits


def test_the_clock_is_read_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_data("demo:", args={"num_graphs": 20})
    model = build_model("gin", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=1)
    plan = plan_cache(model, dataset, resolve_splits(dataset, None), device="cpu")
    # The one device besides the processor that is everywhere.
    elsewhere = replace(plan, model=model.to("meta"), device=torch.device("meta"))
    events: list[str] = []
    clock = iter([10.0, 13.0])

    def read_clock() -> float:
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(device.type))
    assert estimate_seconds(elsewhere) == 3.0  # one batch has all graphs
    assert events == ["meta", "clock", "meta", "clock"]
