"""Checks of a trie report, from its rows alone, and the arms of its ablation."""

import pytest

from workbench.measure import trie_ablation
from workbench.measure.trie_ablation import NO_TRIE, ablation_rows, weight_drafters, weight_name
from workbench.measure.trie_checks import trie_checks
from workbench.measure.trie_plan import GOALS
from workbench.search.prune import PruneConfig

BUILD = {"count_mtok_s": 25.0, "bytes_per_node": 9.5}
PRUNED = [
    {"beam_width": 20, "num_nodes": 59, "ms": 0.1},
    {"beam_width": 40, "num_nodes": 59, "ms": 0.3},
]
WANTED = dict(zip(GOALS, (0.2, 0.7, 20.0, 9.0), strict=True))


def compared(method, prompt_set, tau, lossless=True) -> dict:
    return {"method": method, "prompt_set": prompt_set, "tau": tau, "lossless": lossless}


COMPARED = [
    compared("ar", "maths", 1.0),
    compared(NO_TRIE, "maths", 3.0),
    compared("dart:ngram_weight=0.5", "maths", 3.25),
    compared("ar", "all", 1.0),
    compared(NO_TRIE, "all", 2.0),
    compared("dart:ngram_weight=0.5", "all", 2.5),
    compared("dart:ngram_weight=1", "all", 2.25),
]


def test_checks():
    worth = ablation_rows(COMPARED, [0.5, 1.0])
    found = trie_checks(BUILD, 0.65, PRUNED, worth, WANTED, "_x")
    assert {name: (check.value, check.ok) for name, check in found.items()} == {
        "count_mtok_s_x": (25.0, True),
        "bytes_per_node_x": (9.5, False),
        "query_us_x": (0.65, True),
        "tree_ms_x": (0.1, True),
        "lossless_greedy_x": (True, True),
        "trie_tau_gain_x": (0.5, None),
    }


def test_without_goals_ablation_or_darts_own_setting():
    assert all(check.ok is None for check in trie_checks(BUILD, 0.65, PRUNED).values())
    other = trie_checks(BUILD, 0.65, PRUNED[1:], goals=WANTED)["tree_ms"]
    assert (other.value, other.ok) == (0.3, None), "the goal is for another setting"
    worth = ablation_rows([*COMPARED[:2], compared("dart:ngram_weight=1", "maths", 2.0, lossless=False)], [1.0])
    found = trie_checks(BUILD, 0.65, PRUNED, worth)
    assert found["lossless_greedy"].ok is False and "trie_tau_gain" not in found


def test_rows_of_the_ablation():
    rows = ablation_rows(COMPARED, [0.5, 1.0])
    assert [(row["ngram_weight"], row["tau_gain"]) for row in rows] == [
        (None, 0.0),
        (0.5, 0.25),
        (None, 0.0),
        (0.5, 0.5),
        (1.0, 0.25),
    ]


def test_drafters_differ_by_their_weight_alone(monkeypatch):
    calls = []

    class Drafter:
        def __init__(self, trie="given", prune=None, num_nodes=59):
            self.trie, self.prune = trie, prune or PruneConfig(num_nodes=num_nodes, eos_id=4)

    def load(name, target, **options):
        calls.append((name, target, options))
        return Drafter(**options)

    monkeypatch.setattr(trie_ablation, "load_method", load)
    made = weight_drafters("target", [0.0, 0.25], 17, "built")
    assert list(made) == ["ar", NO_TRIE, "dart:ngram_weight=0", "dart:ngram_weight=0.25"]
    assert all(target == "target" for _, target, _ in calls)
    assert made[NO_TRIE].trie is None and made[weight_name(0.25)].trie == "built"
    assert made[weight_name(0.25)].prune == PruneConfig(num_nodes=17, eos_id=4, ngram_weight=0.25)
    with pytest.raises(ValueError, match="trie=None is none for this target"):
        weight_drafters("target", [0.5], 17, None)
