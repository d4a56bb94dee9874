"""The search kernel: the trees of the compiled search and of the reference, node for node.

Built to catch: another node among equal scores, eos paths that are extended too early or too late, a back-off that
stops at the wrong suffix, counts beyond 16 bits, entries read as signed, a beam row that stands in another's context,
rows of a neighbour, reads outside the arrays, and scratch or outputs that are read unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, poison_empty
from search_setup import (
    SURROUND,
    Case,
    CodedTrie,
    compare,
    empty_trees,
    mixed_case,
    overflowing,
    surrounded,
    variant_of,
    zipf_case,
    zipf_text,
)
from test_prune import GOLDEN

from kernels import prune as prune_file
from kernels.ref.ngrams import DeviceTrie
from kernels.ref.prune import PruneSettings
from kernels.ref.prune import prune as reference
from workbench.search.device_trie import device_trie
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie

GOLDEN_CASES = GOLDEN["cases"] + GOLDEN["extra_cases"]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Several blocks of each kind even in small cases, and less to interpret."""
    for name, size in (("BLOCK", 16), ("RANKED", 32), ("CHUNK", 16)):
        monkeypatch.setattr(prune_file, name, size)


@pytest.mark.parametrize("part", range(4))
def test_reference_equals_the_compiled_search(part):
    rng = np.random.default_rng(part)
    found = sum(len(tree[0]) > 1 for trial in range(80) for tree in mixed_case(rng, trial).check(reference) if tree)
    assert found > 80


@pytest.mark.parametrize("part", range(4))
def test_kernel_equals_the_compiled_search(part, small_blocks):
    rng = np.random.default_rng(100 + part)
    for trial in range(part, 40, 4):
        mixed_case(rng, trial).check(prune_file.prune, reference)


def check_published(case: dict) -> None:
    given = case["input"]
    trie = NgramTrie.count(given["ngram_training_conversations"], order=given["ngram_order"])
    config = PruneConfig(given["beam_width"], given["remain_total"], given["ngram_weight"], given["eos_token"])
    arguments = ([given["topk_tokens"]], [given["topk_probs"]], [given["prompt_tokens"]], trie, config)
    Case(*arguments).check(reference, prune_file.prune)


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case["name"])
def test_published_cases(case):
    check_published(case)


@pytest.mark.parametrize("order", [3, 5])
def test_full_size_with_the_real_blocks(order):
    rng = np.random.default_rng(order)
    text = zipf_text(rng, 20_000)
    trie = NgramTrie.count([text], order)
    trees = zipf_case(rng, 2, trie, text, PruneConfig(eos_id=int(text[7]))).check(prune_file.prune, reference)
    assert [len(tree[0]) for tree in trees] == [60, 60]


def test_more_items_than_one_block_holds():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 12, 300)
    ids = np.array([[rng.permutation(40)[:33] for _ in range(3)]])
    probs = rng.dirichlet(np.ones(33), (1, 3))
    config = PruneConfig(beam_width=1024, num_nodes=63, level_exponent=0.0, logit_decay=1.0)
    Case(ids, probs, [[1, 2]], NgramTrie.count([text], 4), config).check(prune_file.prune, reference)


def test_skipped_paths_still_take_their_places_from_eos_paths(small_blocks):
    ids = [[[1, 0, 3, 4], [2, 0, 3, 4], [0, 1, 3, 4], [4, 1, 3, 2]]]
    probs = [[[0.97, 0.01, 0.01, 0.01], [0.9, 0.09998, 1e-5, 1e-5], [0.97, 0.01, 0.01, 0.01], [0.97, 0.01, 0.01, 0.01]]]
    config = PruneConfig(beam_width=4, num_nodes=4, eos_id=0)
    (tree,) = Case(ids, probs, [[5]], None, config).check(prune_file.prune, reference)
    assert tree[:2] == ([5, 1, 2, 0, 0], [-1, 0, 1, 2, 1])


def test_paths_that_end_in_eos_come_last_in_the_beam(small_blocks):
    """All scores are 0: of the extensions of the second level, that of (1) is the earlier one."""
    config = PruneConfig(beam_width=4, num_nodes=3, eos_id=0)
    (tree,) = Case([[[0, 1], [2, 3]]], [[[1.0, 1.0], [1.0, 1.0]]], [[5]], None, config).check(
        prune_file.prune, reference
    )
    assert tree[:2] == ([5, 0, 1, 2], [-1, 0, 0, 2])


@pytest.mark.parametrize(("ratio", "kept"), [(1 + 1e-6, [5, 1, 3]), (1 - 1e-6, [5, 1, 2])])
def test_a_node_next_to_the_worst_kept_one(ratio, kept, small_blocks):
    config = PruneConfig(num_nodes=2, level_exponent=0.0, logit_decay=1.0)
    probs = [[[0.9, 0.5], [0.5 / 0.9 * ratio, 0.1]]]
    (tree,) = Case([[[1, 2], [3, 4]]], probs, [[5]], None, config).check(prune_file.prune, reference)
    assert tree[0] == kept


def test_bad_probabilities_and_equal_candidates(small_blocks):
    ids = [[[1, 2, 2, 4], [4, 2, 4, 1]]]
    probs = [[[np.nan, 0.5, 0.5, np.inf], [np.nan, 2.0, 0.1, -np.inf]]]
    Case(ids, probs, [[0]], NgramTrie.count([[0, 2, 2, 1]]), PruneConfig(num_nodes=20)).check(
        prune_file.prune, reference
    )


def test_ids_next_to_the_largest(small_blocks):
    ids = [[[2**31 - 1, 2**31 - 2], [2**31 - 2, 65535], [2**31 - 1, 65535]]]
    text = [[2**31 - 2, 7, 2**31 - 2, 65535, 2**31 - 2, 7, 2**31 - 2]]
    trie = NgramTrie.count(text, 3)
    (tree,) = Case(ids, np.full((1, 3, 2), 0.5), [[2**31 - 2, 7]], trie, PruneConfig()).check(
        prune_file.prune, reference
    )
    assert len(tree[0]) == 15


@pytest.mark.parametrize("field", ["starts", "overflow_nodes", "tokens"])
def test_damaged_arrays_are_read_inside_only(field):
    """What lies around the arrays does not change the tree, which is a tree whatever they hold."""
    rng = np.random.default_rng(3)
    exact = overflowing(NgramTrie.count([rng.integers(0, 9, 200)], 4), rng)
    ids, probs = np.array([[rng.permutation(9)[:5] for _ in range(4)]]), rng.dirichlet(np.ones(5), (1, 4))
    case = Case(ids, probs, [[1, 2, 3]], exact, PruneConfig(beam_width=6, num_nodes=30))
    for _ in range(3):
        arguments = case.arguments()
        damaged = getattr(arguments["trie"], field)
        reach = damaged.numel() + SURROUND
        damaged.copy_(torch.from_numpy(rng.integers(-3, reach, damaged.numel())))
        got = []
        for fill in (1, 5):
            arguments["out"] = empty_trees(1, 30)
            arguments["trie"] = surrounded(arguments["trie"], fill)
            prune_file.prune(**arguments)
            got.append([part.tolist() for part in arguments["out"]])
        assert got[0] == got[1]
        parents, size = got[0][1][0], got[0][5][0]
        assert size == 31 and all(0 <= parents[row] < row for row in range(1, size))


def test_an_empty_trie_and_no_requests(small_blocks):
    rng = np.random.default_rng(1)
    ids, probs = np.array([[rng.permutation(9)[:5] for _ in range(4)]]), rng.dirichlet(np.ones(5), (1, 4))
    for order in (2, 3, 4, 5):
        Case(ids, probs, [[1]], NgramTrie.count([], order), PruneConfig(num_nodes=9)).check(prune_file.prune, reference)
        Case(ids[:0], probs[:0], [], NgramTrie.count([], order), PruneConfig()).check(prune_file.prune, reference)


def test_rows_of_requests_that_are_not_there_stay(small_blocks):
    case = mixed_case(np.random.default_rng(7), 3)
    case.limits[:] = [0, 1, 0, 5, 0][: len(case.limits)]
    arguments = case.arguments()
    prune_file.prune(**arguments)
    compare(arguments["out"], case.wanted())
    assert (arguments["out"].tokens[::2] == -7).all()


GOOD = PruneSettings(4, 6, 0.5, 0.7, 0.9, 1e-10, -1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, r"ids is \[2, 3\]"),
        ({"ids": torch.zeros(1, 65, 64, dtype=torch.int64)}, r"K \* C in 1\.\.4096"),
        ({"ids": torch.zeros(1, 2, 3, dtype=torch.int32)}, "ids is torch.int32"),
        ({"ids": torch.zeros(1, 3, 2, dtype=torch.int64).transpose(1, 2)}, "ids is .* contiguous"),
        ({"probs": torch.zeros(1, 2, 3, dtype=torch.float64)}, "probs is torch.float64"),
        ({"tails": torch.zeros(1, 0, dtype=torch.int64)}, r"tails is \[1, 0\]"),
        ({"tails": torch.zeros(2, 1, dtype=torch.int64)}, "tails is .* expected"),
        ({"levels": torch.zeros(2, dtype=torch.int64)}, "levels is"),
        ({"limits": torch.zeros(1)}, "limits is torch.float32"),
        ({"settings": GOOD._replace(beam_width=0)}, r"beam_width is 0, allowed 1\.\.1024"),
        ({"settings": GOOD._replace(num_nodes=64)}, "num_nodes is 64"),
        ({"settings": GOOD._replace(ngram_weight=float("nan"))}, "ngram_weight is nan"),
        ({"settings": GOOD._replace(level_exponent=-1.0)}, "level_exponent is -1.0"),
        ({"settings": GOOD._replace(logit_decay=0.0)}, "logit_decay is 0.0"),
        ({"settings": GOOD._replace(epsilon=1.0)}, "epsilon is 1.0"),
        ({"settings": GOOD._replace(eos_id=-2)}, "eos_id is -2"),
        ({"settings": GOOD._replace(num_nodes=7)}, "tokens is .* expected contiguous torch.int64 .1, 8."),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens is torch.int64, allowed"),
        ({"code_counts": torch.zeros(255, dtype=torch.float64)}, "code_counts has 255 entries"),
        ({"code_counts": torch.zeros(256, dtype=torch.float64)}, "tokens is torch.int16"),
        ({"counts": torch.zeros(3, dtype=torch.int16)}, "counts is"),
        ({"starts": torch.zeros(0, dtype=torch.int32)}, "starts is"),
        ({"overflow_counts": torch.zeros(1, dtype=torch.int64)}, "overflow_counts is"),
        ({"num_roots": 99}, r"num_roots is 99, allowed 0\.\."),
        ({"max_context": 5}, r"max_context is 5, allowed 1\.\.4"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    trie = NgramTrie.count([[1, 2, 3, 1]], 3)
    ids, probs = np.ones((1, 2, 3), np.int64), np.ones((1, 2, 3), np.float32)
    given = Case(ids, probs, [[1]], trie, PruneConfig(beam_width=4, num_nodes=6)).arguments()
    change = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    fields = {name: value for name, value in change.items() if name in DeviceTrie._fields}
    given |= {name: value for name, value in change.items() if name not in fields}
    given["trie"] = given["trie"]._replace(**fields)
    for function in (prune_file.prune, reference):
        with pytest.raises(ValueError, match=named):
            function(**given)


def test_uploaded_arrays_are_the_tries(tmp_path):
    exact = NgramTrie.count([[1, 2, 3, 1, 2, 70_000]], 4)
    exact.save(tmp_path / "a.trie")
    mapped = NgramTrie.open(tmp_path / "a.trie")
    for trie in (exact, mapped, CodedTrie.of(exact)):
        *arrays, num_roots, max_context, codes = trie.arrays()
        got = device_trie(trie, DEVICE)
        assert (got.num_roots, got.max_context) == (num_roots, max_context) == (4, 3)
        for array, tensor in zip((*arrays, codes), got[:6], strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy().view(array.dtype), array)
    got.tokens.zero_()  # a copy, not the file
    assert mapped.frequency([1, 2]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_trees(part):
    rng = np.random.default_rng(part)
    text = zipf_text(rng, 200_000)
    trie = NgramTrie.count([text], (3, 3, 4, 2, 5)[part % 5])
    trie = variant_of(trie, part % 4, rng)
    config = PruneConfig(eos_id=int(text[5]) if part % 3 else None)
    zipf_case(rng, 50, trie, text, config).check(prune_file.prune)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case["name"])
def test_published_cases_on_the_device(case):
    check_published(case)


@pytest.mark.gpu
def test_random_shapes_on_the_device():
    rng = np.random.default_rng(77)
    for trial in range(120):
        mixed_case(rng, trial).check(prune_file.prune)


@pytest.mark.gpu
def test_replay_sees_new_candidates():
    rng = np.random.default_rng(0)
    text = zipf_text(rng, 100_000)
    trie = NgramTrie.count([text], 3)
    fixed = zipf_case(rng, 6, trie, text, PruneConfig()).arguments()
    graph, _ = captured(lambda: prune_file.prune(**fixed))
    for step in range(4):
        case = zipf_case(rng, 6, trie, text, PruneConfig())
        case.levels, case.limits = rng.integers(0, 8, 6), rng.integers(step, 61, 6)
        case.limits[step] = 0
        new = case.arguments()
        for name in ("ids", "probs", "tails", "levels", "limits"):
            fixed[name].copy_(new[name])
        graph.replay()
        compare(fixed["out"], case.wanted())
