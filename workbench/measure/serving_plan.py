"""What a serving report is asked for, checked before anything expensive runs.

Knows the parameters of notebook `07_dscale_serving` by name; loads no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.budget.table import POLICIES
from workbench.decode.sampling import SamplingConfig
from workbench.measure.compare import BASELINE
from workbench.measure.load_cells import LoadConfig
from workbench.measure.methods import parse_method
from workbench.train.predictor_objective import PredictorRecipe
from workbench.types import MAX_TREE_ROWS

_LEAST = {
    "num_prompts": 1,
    "num_requests": 1,
    "trace_requests": 1,
    "trace_slots": 1,
    "train_requests": 1,
    "train_slots": 1,
    "train_rows": 0,
    "rounds_shown": 0,
    "threads": 0,
}
_SAMPLING = ("max_new_tokens", "temperature", "seed", "top_k", "top_p", "accept_rule")
_LESSONS = ("predictor_file", "train_data", "train_sets")
#: Methods whose chains come with the signals that scorers and predictors read.
_CHAINS = ("dflash", "dscale")
#: Fewest prompts of a set that a predictor learns from: some are held back to choose the best epoch.
_MIN_LESSONS = 6


@dataclass(frozen=True)
class ServingPlan:
    """What the parameters come to.

    Attributes:
        requests: arguments for `load_manifests` that all manifests share.
        load: how the cells of the load test run; None without a load test.
        recipe: how a predictor is trained, if one is.
    """

    requests: dict[str, Any]
    load: LoadConfig | None
    recipe: PredictorRecipe

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> ServingPlan:
        """The plan of a notebook's parameters.

        Raises:
            ValueError: a value out of range, values that contradict each other, or a name that is unknown; the message
                says what is allowed.
        """
        _check_sizes(params)
        _check_replay(params["policies"], params["budgets"], params["budget"])
        _check_trace(params)
        _check_lessons(params)
        requests = {name: params[name] for name in _SAMPLING}
        SamplingConfig(**requests)
        return cls(requests, _load_config(params), _recipe(params))


def _check_sizes(params: Mapping[str, Any]) -> None:
    for name, least in _LEAST.items():
        if params[name] < least:
            raise ValueError(f"{name}={params[name]} must be at least {least}")
    if not 0 <= params["train_sampled"] <= 1:
        raise ValueError(f"train_sampled={params['train_sampled']} outside 0..1")


def _check_replay(policies: Sequence[str], budgets: Sequence[float], budget: float) -> None:
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise ValueError(f"policies={unknown} are unknown; allowed: {', '.join(POLICIES)}")
    for name, values in (("policies", policies), ("budgets", budgets)):
        if len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)}: allowed: each once")
    for name, value in [*(("budgets", value) for value in budgets), ("budget", budget)]:
        if not 1 <= value <= MAX_TREE_ROWS:
            raise ValueError(f"{name}: {value} rows a request; allowed: 1..{MAX_TREE_ROWS}")


def _check_trace(params: Mapping[str, Any]) -> None:
    given = [name for name in _LESSONS if params[name]]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; allowed: one of them, a predictor has one origin")
    if params["trace_file"] and not Path(params["trace_file"]).is_file():
        raise ValueError(f"trace_file={params['trace_file']!r} is no file")
    name, trains = params["trace_method"], bool(params["train_data"] or params["train_sets"])
    if not trains and (params["trace_file"] or not name):
        return  # no draft is recorded
    allowed = [method for method in params["methods"] if parse_method(method)[0] in _CHAINS]
    if name not in allowed:
        why = "; training a predictor needs one" if trains else ', or "" for no trace'
        raise ValueError(
            f"trace_method={name!r}; allowed: one of methods={allowed} that drafts chains ({', '.join(_CHAINS)}){why}"
        )


def _check_lessons(params: Mapping[str, Any]) -> None:
    if params["train_sets"] and params["train_requests"] < _MIN_LESSONS:
        raise ValueError(f"train_requests={params['train_requests']}; allowed with train_sets: {_MIN_LESSONS} or more")
    if params["train_data"] or params["train_sets"]:
        # The exact width is known once the drafter is built, see `serving_predictor.check_predictor`.
        size = parse_method(params["trace_method"])[1].get("block_size")
        width = size if isinstance(size, int) and size > 0 else 2
        if params["max_new_tokens"] <= width:
            raise ValueError(
                f"max_new_tokens={params['max_new_tokens']} leaves no draft of {width} rows whole to train a predictor "
                f"on; allowed: more than {width}"
            )


def _load_config(params: Mapping[str, Any]) -> LoadConfig | None:
    control, known = params["control"], [BASELINE, *params["methods"]]
    if not params["concurrency"]:
        return None
    if control not in known:
        raise ValueError(f"control={control!r}; allowed: {', '.join(dict.fromkeys(known))}")
    if max(params["concurrency"]) > params["num_requests"]:
        raise ValueError(
            f"concurrency={list(params['concurrency'])}; allowed: at most num_requests={params['num_requests']} clients"
        )
    names = ("concurrency", "repetitions", "warmup", "row_bucket", "control", "measure_ar")
    return LoadConfig(*(params[name] for name in names))


def _recipe(params: Mapping[str, Any]) -> PredictorRecipe:
    return PredictorRecipe(
        epochs=params["train_epochs"],
        batch_size=params["train_batch_size"],
        learning_rate=params["train_learning_rate"],
        weight_decay=params["train_weight_decay"],
        seed=params["seed"],
    )
