"""What a kernel report is asked for is checked before anything runs."""

import pytest
import torch

from workbench.measure.kernel_plan import Cell, HeadShape, KernelPlan
from workbench.measure.parameters import RUN_DIR, read_parameters, read_yaml
from workbench.paths import notebooks_dir

NOTEBOOK = notebooks_dir() / "08_kernels.ipynb"
PRESETS = sorted((notebooks_dir() / "params").glob("08_kernels.*.yaml"))
CPU = torch.device("cpu")


def params(**changes) -> dict:
    """Defaults of the notebook, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items() if name != RUN_DIR}
    assert changes.keys() <= values.keys()
    return values | changes


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_make_plans(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = KernelPlan.of(params(**read_yaml(path, read_parameters(NOTEBOOK))))
    assert plan.device in (CPU, torch.device("cuda:0"))
    if "benchmark" in path.stem:
        assert [len(cells) for cells in plan.cells.values()] == [13, 3, 3] and plan.shape == "Qwen3-8B"
        assert plan.requests[-1] * plan.drafts == 480 and plan.vocab == 151_936
        assert {cell.requests for cell in plan.cells[plan.shape]} == {1, 8, 16, 32}


def test_cells_are_read_and_written():
    cell = Cell.parse(" 32x ragged8@1024 ")
    assert (cell.requests, cell.kind, cell.rows, cell.context, cell.max_rows) == (32, "ragged", 8, 1024, 16)
    assert cell.label == "32 x ragged8 @ 1024" and Cell.parse(cell.label) == cell
    assert Cell.parse("1 x prefill8192 @ 0").max_rows == 8192


def test_targets_with_the_same_heads_share_a_shape():
    assert HeadShape.of("Qwen3-8B") == HeadShape.of("Qwen3-4B") == HeadShape("Qwen3-4B, Qwen3-8B", 32, 8, 128)
    assert HeadShape.of("Qwen3-14B") == HeadShape("Qwen3-14B", 40, 8, 128)
    assert HeadShape.of("SmolLM2-135M") == HeadShape("SmolLM2-135M", 9, 3, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": ["3 chain4 @ 10"]}, "cell='3 chain4 @ 10'; allowed: N x KIND"),
        ({"cells": ["3 x bush4 @ 10"]}, "KIND one of chain, ragged, tree, prefill"),
        ({"cells": ["0 x chain4 @ 10"]}, r"allowed: 1\.\.256 requests of at least 1 row"),
        ({"cells": ["1 x tree65 @ 10"]}, r"requests of 65 rows; allowed: 1\.\.64"),
        ({"cells": ["1 x ragged33 @ 10"]}, "requests of 66 rows"),
        ({"cells": []}, r"cells=\[\]; allowed: at least one"),
        ({"cells": ["1 x chain4 @ 1", "1x chain4@1"]}, "each once"),
        ({"flex_cells": ["9 x chain4 @ 1"]}, r"flex_cells=\['9 x chain4 @ 1'\]; allowed: some of cells="),
        ({"split_cells": ["9 x chain4 @ 1"]}, "split_cells="),
        ({"shape": "qwen4"}, "shape='qwen4' is unknown; allowed: SmolLM2-135M, "),
        ({"other_shapes": ["qwen4"]}, "shape='qwen4'"),
        ({"other_shapes": ["Qwen3-4B"]}, "each kind of heads once"),
        ({"splits": [1, 3]}, r"splits=\[3\]; allowed: powers of two"),
        ({"splits": [64]}, r"splits=\[64\]; allowed: 1\.\.32"),
        ({"requests": [4, 4]}, "requests=.*each once"),
        ({"requests": [0]}, r"requests=\[0\]; allowed: 1\.\.256"),
        ({"dtype": "int8"}, "dtype='int8'; allowed: float32"),
        ({"device": "tpu"}, "device='tpu'; allowed: cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "device='cuda:99': there are"),
        ({"vocab": 15}, "vocab=15 must be at least 16"),
        ({"drafts": 64}, "drafts=64"),
        ({"drafts": 6, "mean_rows": 8}, "mean_rows=8; allowed: .* one row more than drafts"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"threads": -1}, "threads=-1"),
        ({"goal_floor_share": -0.5}, r"goal_floor_share=-0\.5"),
    ],
)
def test_wrong_plans_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        KernelPlan.of(params(**change))
