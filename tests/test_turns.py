"""Calls that take turns: order and times, with clocks and devices that are fakes."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from workbench.measure import turns
from workbench.measure.turns import time_in_turns

CPU = torch.device("cpu")


def test_calls_take_turns_and_the_median_counts(monkeypatch):
    clock, seen = iter([0.0, 4.0, 4.0, 5.0, 10.0, 12.0, 12.0, 15.0, 20.0, 29.0, 29.0, 31.0]), []
    monkeypatch.setattr(turns, "perf_counter", lambda: next(clock))
    found = time_in_turns({name: partial(seen.append, name) for name in "ab"}, CPU, repeats=3)
    assert seen == ["a", "b"] * 4, "one pass more, before the clock starts"
    assert (found["a"].median_ms, found["a"].min_ms, found["a"].max_ms) == (4000, 2000, 9000)
    assert found["b"].median_ms == 2000 and found["b"].capture_s == found["b"].pool_bytes == 0


def test_graphs_are_replayed_between_events_without_waiting_in_between(monkeypatch):
    """The order of what a GPU is told, without one."""
    log = []

    report = turns.GraphPool(CPU).report

    class Pool:
        def __init__(self, device):
            self.report = report

        def run(self, key, work):
            log.append(key[0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 3.0

    monkeypatch.setattr(turns, "GraphPool", Pool)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    found = time_in_turns({"a": print, "b": print}, torch.device("cuda"), repeats=2)
    assert log == ["a", "b"] * 3 + ["event", "a", "event", "event", "b", "event"] * 2 + ["wait"]
    assert found["a"].median_ms == 3.0


@pytest.mark.parametrize(("calls", "repeats"), [({}, 1), ({"a": print}, 0)])
def test_nothing_to_time_is_refused(calls, repeats):
    with pytest.raises(ValueError, match="allowed: at least one of each"):
        time_in_turns(calls, CPU, repeats)
