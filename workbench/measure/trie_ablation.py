"""DART with its n-gram term weighted more or less, and without a trie: drafters for `compare`, rows of the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.load import load_method
from workbench.measure.compare import BASELINE
from workbench.models.target import Target
from workbench.search.trie import NgramTrie
from workbench.types import Drafter

#: DART's name without a trie, as `measure.methods` writes it.
NO_TRIE = "dart:trie=none"


def weight_name(weight: float) -> str:
    """How a comparison calls DART with this weight of its n-gram term."""
    return f"dart:ngram_weight={weight:g}"


def weight_drafters(
    target: Target, weights: Sequence[float], num_nodes: int, trie: NgramTrie | str | Path = "default"
) -> dict[str, Drafter]:
    """The baseline, DART without a trie, and DART with every weight.

    Args:
        target: what they draft for; DART's weights for it are the shipped ones.
        weights: of the n-gram term, 0..100.
        num_nodes: of a tree, the root not counted.
        trie: as in `build_dart`.

    Raises:
        ValueError: no trie, a weight out of range, or no drafter for the target.
    """
    plain = load_method("dart", target, trie=None, num_nodes=num_nodes)
    drafters = {BASELINE: load_method(BASELINE, target), NO_TRIE: plain}
    for weight in weights:
        settings = replace(plain.prune, ngram_weight=weight)
        drafter = load_method("dart", target, trie=trie, prune=settings)
        if drafter.trie is None:
            raise ValueError(f"trie={trie!r} is none for this target; allowed: a trie of its ids")
        drafters[weight_name(weight)] = drafter
    return drafters


def ablation_rows(rows: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a comparison with the weight (None without a trie) and tau_gain, tau less that without a trie.

    Args:
        rows: of a `Comparison` of `weight_drafters`.
        weights: these.
    """
    of_name = {weight_name(weight): weight for weight in weights}
    without = {row["prompt_set"]: row["tau"] for row in rows if row["method"] == NO_TRIE}
    return [
        {"ngram_weight": of_name.get(row["method"]), "tau_gain": row["tau"] - without[row["prompt_set"]], **row}
        for row in rows
        if row["method"] != BASELINE
    ]
