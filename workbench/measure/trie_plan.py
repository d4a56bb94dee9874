"""What a report on an n-gram trie is asked for, checked before anything is read or counted.

Knows the parameters of notebook `03_build_trie` by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.decode.engine import SamplingConfig
from workbench.search.corpus import CorpusOptions
from workbench.search.count_corpus import check_resources
from workbench.search.ngram_count import check_order
from workbench.search.prune import PruneConfig

#: Corpus that every machine has: source of Python's standard library and of the installed packages.
PYTHON = "python"
#: Tokenizer of the embedded target.
EMBEDDED = "embedded"
#: Words, signs and indentations of source; for the corpus `PYTHON` only.
WORDS = "words"
#: Parameters that are goals of checks; 0 makes a check informative only.
GOALS = ("goal_tree_ms", "goal_query_us", "goal_count_mtok_s", "goal_bytes_per_node")

_LEAST = {
    "max_tokens": 0,
    "levels": 1,
    "width": 1,
    "queries": 1,
    "queries_per_call": 1,
    "cases": 1,
    "repeats": 1,
    "workers": 1,
    "threads": 0,
    "seed": 0,
    **dict.fromkeys(GOALS, 0),
}


@dataclass(frozen=True)
class TriePlan:
    """What the parameters come to.

    Attributes:
        corpus, tokenizer, suffixes, max_tokens: what is counted, see `trie_corpus.open_source`; 0 tokens for all.
        order, min_count, memory_mb, workers: of `count_corpus`.
        held_out: share of the documents that is kept back.
        quantised: keep counts as codes of eight bits.
        tree_sizes, beam_widths: settings of the search that are timed.
        ngram_weights: of the ablation.
        levels, width: of a search, K and C.
        queries, queries_per_call: look-ups that are timed, and how many share a call.
        cases, repeats: searches that are timed, and passes over them and over the look-ups.
        seed: of everything random.
    """

    corpus: str
    tokenizer: str
    suffixes: tuple[str, ...]
    max_tokens: int
    order: int
    min_count: tuple[int, ...]
    memory_mb: float
    workers: int
    held_out: float
    quantised: bool
    tree_sizes: tuple[int, ...]
    beam_widths: tuple[int, ...]
    ngram_weights: tuple[float, ...]
    levels: int
    width: int
    queries: int
    queries_per_call: int
    cases: int
    repeats: int
    seed: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> TriePlan:
        """The plan of a notebook's parameters.

        Raises:
            ValueError: a value out of range; the message says what is allowed.
        """
        for name, least in _LEAST.items():
            if not least <= params[name] < math.inf:
                raise ValueError(f"{name}={params[name]} must be at least {least}")
        check_resources(params["workers"], params["memory_mb"])
        if not 0 < params["held_out"] < 1:
            raise ValueError(f"held_out={params['held_out']}; allowed: above 0 and below 1")
        if params["queries"] < params["queries_per_call"]:
            raise ValueError(f"queries={params['queries']} must be at least queries_per_call")
        _check_source(params["corpus"], params["tokenizer"])
        _check_search(params)
        if params["ablation"]:
            _check_ablation(params)
        least = params["min_count"]
        values = {name: params[name] for name in cls.__dataclass_fields__}
        values["min_count"] = check_order(params["order"], least[0] if len(least) == 1 else tuple(least))
        for name in ("suffixes", "tree_sizes", "beam_widths", "ngram_weights"):
            values[name] = tuple(params[name])
        CorpusOptions(text_suffixes=values["suffixes"])
        return cls(**values)


def _check_source(corpus: str, tokenizer: str) -> None:
    if corpus != PYTHON and not (corpus and Path(corpus).expanduser().exists()):
        raise ValueError(f"corpus={corpus!r}; allowed: {PYTHON}, or an existing file or folder")
    if tokenizer == WORDS and corpus != PYTHON:
        raise ValueError(f"tokenizer={tokenizer!r}; allowed with the corpus {PYTHON!r} only")
    if tokenizer not in (WORDS, EMBEDDED, "") and not Path(tokenizer).expanduser().exists():
        raise ValueError(f"tokenizer={tokenizer!r}; allowed: {EMBEDDED}, {WORDS}, a tokenizer.json or its folder")
    if tokenizer == "" and corpus == PYTHON:
        raise ValueError(f"tokenizer='' is for token files; the corpus {PYTHON!r} is text")


def _check_search(params: Mapping[str, Any]) -> None:
    """Settings of the search, by making them."""
    for name in ("tree_sizes", "beam_widths", "ngram_weights"):
        values = params[name]
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)}; allowed: at least one, each once")
    for beam_width in params["beam_widths"]:
        for num_nodes in params["tree_sizes"]:
            PruneConfig(beam_width=beam_width, num_nodes=num_nodes)
    for weight in params["ngram_weights"]:
        PruneConfig(ngram_weight=weight)


def _check_ablation(params: Mapping[str, Any]) -> None:
    """What is decoded, and with what; the model and the prompts are checked by loading them."""
    trie, names = params["ablation_trie"], params["prompt_sets"]
    if trie not in ("default", "built") and not Path(trie).is_file():
        raise ValueError(f"ablation_trie={trie!r}; allowed: default, built, or an existing file")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"prompt_sets={list(names)}; allowed: at least one, each once")
    if params["num_prompts"] < 1:
        raise ValueError(f"num_prompts={params['num_prompts']} must be at least 1")
    PruneConfig(num_nodes=params["num_nodes"])
    SamplingConfig(max_new_tokens=params["max_new_tokens"], seed=params["seed"])
