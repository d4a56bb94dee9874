"""Checks of a report on an n-gram trie, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.measure.records import Check
from workbench.measure.trie_plan import GOALS
from workbench.search.prune import PruneConfig

Row = Mapping[str, Any]


def trie_checks(
    build: Row,
    query_us: float,
    prune: Sequence[Row],
    ablation: Sequence[Row] = (),
    goals: Mapping[str, float] | None = None,
    suffix: str = "",
) -> dict[str, Check]:
    """How far building, look-ups and searches are from what they should take.

    Args:
        build: row of the build, with count_mtok_s and bytes_per_node.
        query_us: microseconds of a look-up of all candidates of a level, see `search_times.query_us`.
        prune: rows of `search_times.prune_rows`.
        ablation: rows of `trie_ablation.ablation_rows`, empty when it did not run.
        goals: by parameter (`GOALS`); 0 or none makes a check informative only.
        suffix: appended to the names, to tell runs of different settings apart.

    Returns:
        count_mtok_s: million tokens a second counted in memory on one thread.
        bytes_per_node: of the file.
        query_us: see above.
        tree_ms: a search for one request, the call from Python included, with DART's settings (59 nodes, beam 20), or
            those of the last row when these were not measured; only DART's own have the goal.
        trie_tau_gain: tokens a round that the trie adds with DART's own weight, over all prompt sets, if measured.
        lossless_greedy: whether all outputs of the ablation equal those of autoregressive decoding.
    """
    wanted = dict.fromkeys(GOALS, 0.0) | dict(goals or {})
    own = PruneConfig()
    exact = [r for r in prune if (r["num_nodes"], r["beam_width"]) == (own.num_nodes, own.beam_width)]
    found = {
        "count_mtok_s": Check(build["count_mtok_s"], wanted["goal_count_mtok_s"] or None),
        "bytes_per_node": Check(build["bytes_per_node"], wanted["goal_bytes_per_node"] or None, "<="),
        "query_us": Check(query_us, wanted["goal_query_us"] or None, "<="),
        "tree_ms": Check((exact or prune)[-1]["ms"], (wanted["goal_tree_ms"] or None) if exact else None, "<="),
    }
    if ablation:
        found["lossless_greedy"] = Check(all(row["lossless"] is True for row in ablation), True, "==")
        last = ablation[-1]["prompt_set"]
        for row in ablation:
            if row["prompt_set"] == last and row["ngram_weight"] == own.ngram_weight:
                found["trie_tau_gain"] = Check(row["tau_gain"], None)
    return {name + suffix: check for name, check in found.items()}
