"""What a latency report is asked for is checked before anything runs."""

import pytest
import torch

from workbench.measure.latency_plan import ARMS, GOALS, LatencyPlan
from workbench.measure.parameters import RUN_DIR, read_parameters, read_yaml
from workbench.paths import notebooks_dir

NOTEBOOK = notebooks_dir() / "04_latency.ipynb"
PRESETS = sorted((notebooks_dir() / "params").glob("04_latency.*.yaml"))


def params(**changes) -> dict:
    """Defaults of the notebook, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items() if name != RUN_DIR}
    assert changes.keys() <= values.keys()
    return values | changes


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_make_plans(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = params(**read_yaml(path, read_parameters(NOTEBOOK)))
    plan = LatencyPlan.of(given)
    if "benchmark" in path.stem:
        assert list(plan.cells) == ["Qwen3-8B", "Qwen3-4B", "Qwen3-1.7B", "Qwen3-14B"] and plan.shape == "Qwen3-8B"
        assert [sum(c.requests * c.rows for c in cells) for cells in plan.cells.values()] == [1229, 1229, 61, 61]
        assert plan.num_layers("Qwen3-14B") == 40 and plan.step_shapes == ["Qwen3-8B", "Qwen3-4B"]
        assert plan.requests == [1, 8, 16, 32] and plan.context == 1024 and plan.dtype == torch.bfloat16
        assert [given[name] for name in GOALS] == [1.15, 1.3, 0.45, 0.04, 0.5]
    else:
        assert plan.device.type == "cpu" and plan.num_layers("Qwen3-14B") == 8
        assert not any(given[name] for name in GOALS)


def test_contexts_up_to_the_last_position():
    plan = LatencyPlan.of(params(context=8128, cells=["1 x chain4 @ 8128"]))
    assert plan.context == 8128


def test_arms_by_number_of_requests():
    plan = LatencyPlan.of(params(arms=["tile", "control"], most_requests_arms=["paper"], requests=[4, 1]))
    assert list(plan.arms_at(1)) == ["control", "tile"] and list(plan.arms_at(4)) == ["control", "paper", "tile"]
    assert plan.arms_at(4)["paper"] == ARMS["paper"]
    default = LatencyPlan.of(params())
    assert list(default.arms_at(4)) == list(ARMS) and set(ARMS) - set(default.arms_at(1)) == {"paper", "launched"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": []}, "shapes=.*at least one"),
        ({"shapes": ["qwen4"]}, "shape='qwen4' is unknown; allowed: SmolLM2-135M, "),
        ({"other_shapes": ["SmolLM2-135M"]}, "shapes and other_shapes=.*each once"),
        ({"other_shapes": ["Qwen3-4B"], "other_cells": []}, "other_cells=.*at least one"),
        ({"cells": []}, r"cells=\[\]; allowed: at least one"),
        ({"cells": ["1 x chain4 @ 1", "1x chain4@1"]}, "each once"),
        ({"cells": ["1 x bush4 @ 1"]}, "KIND one of chain, ragged, tree"),
        ({"cells": ["1 x prefill4 @ 1"]}, "is a prefill; allowed: chain, ragged, tree"),
        ({"cells": ["1 x chain4 @ 8129"]}, "cells: context of '1 x chain4 @ 8129'=8129 and 64 rows .* 8192 positions"),
        ({"context": 8129}, "step_shapes: context=8129 and 64 rows go beyond the 8192 .*allowed: up to 8128"),
        ({"context": 8129, "step_shapes": []}, "draft_shapes: context=8129"),
        ({"arms": ["tile"]}, r"arms=\['tile'\].*control among arms"),
        ({"arms": ["control", "tile", "tile"]}, "each once"),
        ({"arms": ["control", "paper"]}, "each once in either"),
        (
            {"most_requests_arms": ["none"]},
            r"most_requests_arms=\['none'\]; allowed: ar, dart, dart_search, control, paper, tile",
        ),
        ({"forward_cells": ["9 x chain1 @ 1"]}, r"forward_cells=\['9 x chain1 @ 1'\]; allowed: some of cells="),
        ({"forwards": ["auto"]}, r"forwards=\['auto'\]; allowed: stock, compiled, fused, each once"),
        ({"forwards": ["stock", "stock"]}, "each once"),
        ({"step_shapes": ["a"]}, "shape='a'"),
        ({"draft_shapes": ["Qwen3-4B", "Qwen3-4B"]}, "draft_shapes=.*each once"),
        ({"requests": []}, "requests=.*at least one"),
        ({"requests": [0]}, r"requests=\[0\]; allowed: 1\.\.64"),
        ({"requests": [2, 2]}, "each once"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"mean_rows": 17}, r"mean_rows=17; allowed: 1\.\.16"),
        ({"layers": 7}, r"layers=7; allowed: 0 \(as published\), 8 or more"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"goal_draft_ms": -1.0}, "goal_draft_ms"),
        ({"dtype": "int8"}, "dtype='int8'; allowed: float32"),
        ({"device": "tpu"}, "device='tpu'; allowed: cpu, cuda, cuda:N"),
    ],
)
def test_wrong_plans_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LatencyPlan.of(params(**change))
