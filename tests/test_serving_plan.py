"""What a serving notebook is asked for is checked before anything runs."""

import json

import pytest

from workbench.measure.parameters import RUN_DIR, read_parameters, read_yaml
from workbench.measure.serving_plan import ServingPlan
from workbench.paths import notebooks_dir, repo_root

NOTEBOOK = notebooks_dir() / "07_dscale_serving.ipynb"
SHORT = "dflash:block_size=8"
PRESETS = sorted((notebooks_dir() / "params").glob("07_dscale_serving.*.yaml"))


def params(**changes) -> dict:
    """Defaults of the notebook, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items() if name != RUN_DIR}
    assert changes.keys() <= values.keys()
    return values | changes


def test_the_defaults():
    plan = ServingPlan.of(params(seed=3, train_epochs=7, train_weight_decay=2.0, accept_rule="rejection"))
    assert plan.load.concurrencies == (2, 4) and (plan.load.control, plan.load.repetitions) == ("dflash", 3)
    assert (plan.recipe.epochs, plan.recipe.weight_decay, plan.recipe.seed) == (7, 2.0, 3)
    assert plan.requests["accept_rule"] == "rejection" and plan.requests["seed"] == 3
    assert ServingPlan.of(params(concurrency=[], control="none")).load is None


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_make_plans(path):
    ServingPlan.of(params(**read_yaml(path, read_parameters(NOTEBOOK))))


def test_the_committed_record_is_that_of_the_benchmark_preset():
    record = json.loads((repo_root() / "reports/reference/07_dscale_serving_gpu.json").read_text())
    preset = params(**read_yaml(PRESETS[0], read_parameters(NOTEBOOK)))
    assert PRESETS[0].name == "07_dscale_serving.benchmark.yaml"
    assert {name: preset[name] for name in record["params"]} == record["params"]


def test_the_shipped_predictor_is_that_of_the_predictor_preset():
    record = json.loads((repo_root() / "reports/reference/07_predictor_gpu.json").read_text())["params"]
    path = next(path for path in PRESETS if path.stem.endswith(".predictor"))
    preset = params(**read_yaml(path, read_parameters(NOTEBOOK)))
    names = {"slots": "train_slots", "sampled_share": "train_sampled", "recorded_train": "train_rows"}
    names |= {name: f"train_{name}" for name in ("epochs", "batch_size", "learning_rate", "weight_decay")}
    names |= {name: name for name in ("max_new_tokens", "dtype", "seed")}
    assert {name: preset[there] for name, there in names.items()} == {name: record[name] for name in names}
    recipe = ServingPlan.of(preset).recipe
    assert (recipe.length_weight, recipe.use_live_count) == (record["length_weight"], record["use_live_count"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace_method": "dflsh"}, r"trace_method='dflsh'; allowed: one of methods=\['dflash', .*no trace"),
        ({"trace_method": "ar", "methods": ["ar", "dflash"]}, r"trace_method='ar'; allowed: .*\['dflash'\]"),
        ({"trace_method": "", "train_sets": ["code"]}, "trace_method=''; .*training a predictor needs one"),
        ({"trace_method": "", "train_data": "x"}, "trace_method=''; .*training a predictor needs one"),
        ({"trace_method": "x", "train_data": "x", "trace_file": str(NOTEBOOK)}, "trace_method='x'"),
        ({"trace_file": "nowhere"}, "trace_file='nowhere' is no file"),
        ({"train_data": "x", "train_sets": ["code"]}, "train_data and train_sets are given"),
        ({"train_data": "x", "predictor_file": "y"}, "predictor_file and train_data are given"),
        ({"concurrency": [4, 0]}, r"concurrencies=\(4, 0\)"),
        ({"concurrency": [4, 4]}, r"concurrencies=\(4, 4\).*each once"),
        ({"control": "dart"}, "control='dart'; allowed: ar, dflash, dscale"),
        ({"control": "ar", "measure_ar": False}, "control='ar' is not measured"),
        ({"repetitions": 0}, "repetitions=0"),
        ({"policies": ["dvl", "dlv"]}, r"policies=\['dlv'\] are unknown; allowed: full, uniform"),
        ({"policies": ["dvl", "dvl"]}, r"policies=\['dvl', 'dvl'\]: allowed: each once"),
        ({"budgets": [8.0, 8.0]}, "budgets=.*each once"),
        ({"budgets": [0.5]}, r"budgets: 0\.5 rows a request; allowed: 1\.\.64"),
        ({"budgets": [65.0]}, r"budgets: 65\.0 rows"),
        ({"budget": 0.0}, r"budget: 0\.0 rows"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"accept_rule": "guess"}, "accept_rule='guess'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"train_sampled": 1.5}, r"train_sampled=1\.5 outside 0\.\.1"),
        ({"train_epochs": 0}, "epochs=0"),
        ({"train_rows": -1}, "train_rows=-1 must be at least 0"),
        ({"trace_slots": 0}, "trace_slots=0 must be at least 1"),
        ({"num_requests": 0}, "num_requests=0"),
        ({"trace_method": "dart", "methods": ["dart", "dflash"]}, r"'dart'; .*=\['dflash'\] that drafts chains \(dfl"),
        ({"trace_method": "ngram", "methods": ["ngram", "dflash"], "train_data": "x"}, "trace_method='ngram'; allowed"),
        ({"concurrency": [2, 17]}, r"concurrency=\[2, 17\]; allowed: at most num_requests=16 clients"),
        ({"train_sets": ["chat"], "train_requests": 5}, "train_requests=5; allowed with train_sets: 6 or more"),
        ({"train_data": "x", "max_new_tokens": 2}, "max_new_tokens=2 leaves no draft of 2 rows whole"),
        (
            {"train_data": "x", "max_new_tokens": 8, "trace_method": SHORT, "methods": [SHORT]} | {"concurrency": []},
            "max_new_tokens=8 leaves no draft of 8 rows whole to train a predictor on; allowed: more than 8",
        ),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ServingPlan.of(params(**change))


def test_what_is_not_used_is_not_checked():
    ServingPlan.of(params(trace_method=""))
    ServingPlan.of(params(trace_method="x", trace_file=str(NOTEBOOK)))
    ServingPlan.of(params(train_requests=1, max_new_tokens=2))
    ServingPlan.of(params(train_requests=5, train_data="x"))


@pytest.mark.parametrize("name", [SHORT, "dscale:policy=topk"])
def test_variants_of_chain_drafters_may_be_recorded(name):
    changes = {"methods": ["dflash", name], "trace_method": name, "train_sets": ["chat"], "train_requests": 6}
    ServingPlan.of(params(**changes, max_new_tokens=9))
