"""Tree pruning against the published cases and a plain restatement; tree encodings."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from reference_search import count_ngrams, prune

from workbench.search.encode import ancestor_masks, ancestor_matrix, leaf_rows, token_paths
from workbench.search.prune import PruneConfig, prune_tree, prune_trees
from workbench.search.trie import NgramTrie
from workbench.types import DraftTree, chain_tree

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dart_tree_cases.json").read_text())


def check_shape(tree: DraftTree) -> None:
    """Root first, parents before children, best first."""
    rows = np.arange(tree.num_nodes + 1)
    assert tree.parents[0] == -1 and tree.depths[0] == 0 and tree.scores[0] == 0
    assert (tree.parents[1:] >= 0).all() and (tree.parents[1:] < rows[1:]).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert (np.diff(tree.scores) <= 0).all() and np.isfinite(tree.scores).all()
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int32] * 3
    assert tree.scores.dtype == np.float32


def golden_tree(case: dict) -> DraftTree:
    given = case["input"]
    trie = NgramTrie.count(given["ngram_training_conversations"], order=given["ngram_order"])
    config = PruneConfig(
        beam_width=given["beam_width"],
        num_nodes=given["remain_total"],
        ngram_weight=given["ngram_weight"],
        eos_id=given["eos_token"],
    )
    ids, probs = np.array(given["topk_tokens"]), np.array(given["topk_probs"], np.float32)
    return prune_tree(ids, probs, given["prompt_tokens"], trie, config)


@pytest.mark.parametrize("case", GOLDEN["cases"] + GOLDEN["extra_cases"], ids=lambda case: case["name"])
def test_published_cases(case):
    tree = golden_tree(case)
    check_shape(tree)
    paths = token_paths(tree)
    expected = {tuple(node["path"]): node["score"] for node in case["canonical_nodes_sorted"]}
    assert set(paths[1:]) == set(expected)
    np.testing.assert_allclose(tree.scores[1:], [expected[path] for path in paths[1:]], atol=2e-5)

    raw = {name: np.array(value) for name, value in case["expected"].items()}
    theirs = token_paths(_tree_of_mask(raw["draft_tokens"], raw["tree_mask"]))
    ours_in_their_order = np.array([paths.index(path) for path in theirs])
    np.testing.assert_array_equal(tree.tokens[ours_in_their_order], raw["draft_tokens"])
    np.testing.assert_array_equal(tree.depths[ours_in_their_order], raw["tree_position_ids"])
    matrix = ancestor_matrix(tree.parents)[np.ix_(ours_in_their_order, ours_in_their_order)]
    np.testing.assert_array_equal(matrix, raw["tree_mask"].astype(bool))
    relabelled = np.append(ours_in_their_order, -1)[raw["retrieve_indices"]]
    np.testing.assert_array_equal(leaf_rows(tree), relabelled)


def _tree_of_mask(tokens: np.ndarray, mask: np.ndarray) -> DraftTree:
    """The tree of the reference's arrays: a row's parent is the deepest row it sees besides itself."""
    depths = mask.sum(1) - 1
    parents = [-1, *(max(np.flatnonzero(mask[i])[:-1], key=lambda j: depths[j]) for i in range(1, len(mask)))]
    return DraftTree(tokens, np.array(parents), depths, np.zeros(len(tokens), np.float32))


def test_ties_that_break_the_reference_stay_closed():
    case = GOLDEN["defect_demonstration"][0]
    tree = golden_tree(case)
    check_shape(tree)
    assert tree.num_nodes == case["input"]["remain_total"]


def random_case(rng: np.random.Generator, tied: bool):
    """Random candidates, corpus and settings; `tied` draws probabilities and counts that make equal scores."""
    vocab, levels, width = int(rng.integers(3, 13)), int(rng.integers(1, 6)), int(rng.integers(1, 8))
    order = int(rng.integers(2, 6))
    ids = np.array([rng.permutation(vocab + 5)[:width] for _ in range(levels)])
    eos_id = vocab + 5
    if rng.integers(2):  # eos among the candidates of most levels
        ids[np.arange(levels), rng.integers(0, width, levels)] = np.where(rng.random(levels) < 0.8, eos_id, ids[:, 0])
    if tied:
        probs = rng.choice([0.0, 0.25, 0.5, 1.0], size=ids.shape, p=[0.1, 0.2, 0.2, 0.5])
        sequences = [[int(t)] * 6 for t in range(vocab)] + [ids[:, 0].tolist()]
    else:
        probs = rng.dirichlet(np.full(width, 0.5), size=levels)
        sequences = [rng.integers(0, vocab, size=rng.integers(0, 30)).tolist() for _ in range(6)]
        sequences += [row.tolist() for row in ids.T]
    config = PruneConfig(
        beam_width=int(rng.integers(1, 9)),
        num_nodes=int(rng.integers(1, 25)),
        ngram_weight=float(rng.choice([0.0, 0.25, 0.5, 1.5])),
        eos_id=[None, eos_id, eos_id, int(ids[-1, 0])][rng.integers(4)],
        level_exponent=float(rng.choice([0.0, 0.7])),
        logit_decay=float(rng.choice([0.5, 0.9, 1.0])),
        epsilon=float(rng.choice([1e-10, 1e-4])),
    )
    context = rng.integers(0, vocab, size=rng.integers(1, 6)).tolist()
    return ids, probs.astype(np.float32), context, sequences, order, config


@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
def test_equals_the_plain_restatement(tied):
    rng = np.random.default_rng(11 + tied)
    for trial in range(300):
        ids, probs, context, sequences, order, config = random_case(rng, tied)
        without = trial % 10 == 0
        trie = None if without else NgramTrie.count(sequences, order)
        counts = None if without else count_ngrams(sequences, order)
        tree = prune_tree(ids, probs, context, trie, config)
        check_shape(tree)
        expected = prune(ids, probs, context, counts, order, config)
        assert token_paths(tree)[1:] == [path for path, _ in expected], f"trial {trial}"
        np.testing.assert_allclose(tree.scores[1:], [score for _, score in expected], rtol=1e-6)
        assert tree.tokens[0] == context[-1]


def test_skipped_paths_still_take_their_places_from_eos_paths():
    """Paths too bad to be kept are never computed, yet they fill the beam, so (1, 2, 0) must not be extended."""
    ids = [[1, 0, 3, 4], [2, 0, 3, 4], [0, 1, 3, 4], [4, 1, 3, 2]]
    probs = [[0.97, 0.01, 0.01, 0.01], [0.9, 0.09998, 1e-5, 1e-5], [0.97, 0.01, 0.01, 0.01], [0.97, 0.01, 0.01, 0.01]]
    config = PruneConfig(beam_width=4, num_nodes=4, eos_id=0)
    paths = token_paths(prune_tree(ids, probs, [5], None, config))[1:]
    assert paths == [path for path, _ in prune(ids, probs, [5], None, 3, config)] == [(1,), (1, 2), (1, 2, 0), (1, 0)]


def full_size_case(rng: np.random.Generator):
    """DART's own shape: 8 levels of 25 candidates, order 3."""
    ids = np.array([rng.permutation(60)[:25] for _ in range(8)])
    probs = -np.sort(-rng.dirichlet(np.full(25, 0.3), size=8)).astype(np.float32)
    return ids, probs, [3, 7, 1]


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return np.minimum(rng.zipf(1.3, size=(40, 50)) - 1, 59).tolist()


def test_full_size_equals_the_plain_restatement(sequences):
    rng, trie, counts = np.random.default_rng(3), NgramTrie.count(sequences), count_ngrams(sequences, 3)
    for num_nodes in (7, 59, 63):
        ids, probs, context = full_size_case(rng)
        config = PruneConfig(num_nodes=num_nodes, eos_id=int(ids[2, 1]))
        tree = prune_tree(ids, probs, context, trie, config)
        expected = prune(ids, probs, context, counts, 3, config)
        assert token_paths(tree)[1:] == [path for path, _ in expected]


def test_wide_vocabularies_give_the_same_tree(sequences):
    ids, probs, context = full_size_case(np.random.default_rng(4))
    config = PruneConfig()
    narrow = prune_tree(ids, probs, context, NgramTrie.count(sequences), config)
    wide = prune_tree(ids, probs, context, NgramTrie.count(sequences, vocab_size=200_000), config)
    np.testing.assert_array_equal(narrow.tokens, wide.tokens)
    np.testing.assert_array_equal(narrow.scores, wide.scores)


def test_first_nodes_are_the_smaller_tree(sequences):
    trie = NgramTrie.count(sequences)
    ids, probs, context = full_size_case(np.random.default_rng(6))
    largest = prune_tree(ids, probs, context, trie, PruneConfig(num_nodes=63))
    for num_nodes in range(1, 64):
        tree = prune_tree(ids, probs, context, trie, PruneConfig(num_nodes=num_nodes))
        for ours, theirs in zip(vars(tree).values(), vars(largest.first(num_nodes)).values(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_no_trie_and_weight_zero_and_empty_trie():
    ids, probs, context = full_size_case(np.random.default_rng(8))
    absent = prune_tree(ids, probs, context, None, PruneConfig())
    weightless = prune_tree(ids, probs, context, NgramTrie.count([ids[:, 0]]), PruneConfig(ngram_weight=0.0))
    np.testing.assert_array_equal(absent.scores, weightless.scores)
    np.testing.assert_array_equal(absent.tokens, weightless.tokens)
    unseen = prune_tree(ids, probs, context, NgramTrie.count([]), PruneConfig(num_nodes=63))
    assert unseen.scores[unseen.depths == 2].max() < 0.5 * 2**-0.7 * np.log(1e-10), "an unseen n-gram costs 7.09"


def test_bad_probabilities_count_as_zero_or_one():
    ids = np.array([[1, 2, 3, 4], [1, 2, 3, 4]])
    probs = np.array([[np.nan, 0.5, -1.0, np.inf], [np.nan, 2.0, 0.1, -np.inf]], np.float32)
    tree = prune_tree(ids, probs, [0], NgramTrie.count([[0, 2, 2, 1]]), PruneConfig(num_nodes=20))
    check_shape(tree)
    assert tree.num_nodes == 20
    clean = np.array([[0, 0.5, 0, 1], [0, 1, 0.1, 0]], np.float32)
    same = prune_tree(ids, clean, [0], NgramTrie.count([[0, 2, 2, 1]]), PruneConfig(num_nodes=20))
    np.testing.assert_array_equal(tree.scores, same.scores)


def test_fewer_candidates_than_nodes():
    tree = prune_tree([[5, 6]], [[0.9, 0.1]], [1], None, PruneConfig())
    assert tree.tokens.tolist() == [1, 5, 6] and tree.parents.tolist() == [-1, 0, 0]
    one = prune_tree([[5]], [[1.0]], [1], None, PruneConfig(num_nodes=1, beam_width=1))
    assert one.tokens.tolist() == [1, 5]


def test_batch_equals_single_calls(sequences):
    rng, trie, config = np.random.default_rng(9), NgramTrie.count(sequences, order=4), PruneConfig(eos_id=0)
    cases = [full_size_case(rng) for _ in range(5)]
    contexts = [[3], [4, 5], np.arange(50, dtype=np.int32), [-7, 2**40, 9], (1, 2, 3, 4)]
    ids, probs = np.stack([case[0] for case in cases]).astype(np.int32), np.stack([case[1] for case in cases])
    batch = prune_trees(ids, probs, contexts, trie, config)
    with ThreadPoolExecutor(2) as pool:
        singles = list(pool.map(lambda r: prune_tree(ids[r], probs[r], contexts[r], trie, config), range(5)))
    for ours, alone, context in zip(batch, singles, contexts, strict=True):
        check_shape(ours)
        assert ours.tokens[0] == context[-1]
        np.testing.assert_array_equal(ours.tokens, alone.tokens)
        np.testing.assert_array_equal(ours.parents, alone.parents)
        np.testing.assert_array_equal(ours.scores, alone.scores)
    assert prune_trees(ids[:0], probs[:0], [], trie, config) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 1025),
        ("num_nodes", 0),
        ("num_nodes", 64),
        ("ngram_weight", -0.1),
        ("ngram_weight", float("nan")),
        ("eos_id", -1),
        ("eos_id", 2**31),
        ("level_exponent", -0.7),
        ("logit_decay", 0.0),
        ("logit_decay", 1.1),
        ("epsilon", 0.0),
        ("epsilon", 1.0),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value}, allowed"):
        PruneConfig(**{field: value})


@pytest.mark.parametrize(
    ("ids", "probs", "context", "message"),
    [
        ([[1, 2]], [[0.5]], [1], "allowed: twice"),
        ([1, 2], [0.5, 0.5], [1], "allowed: twice"),
        (np.zeros((0, 3), int), np.zeros((0, 3)), [1], "allowed: twice"),
        ([[1.0, 2.0]], [[0.5, 0.5]], [1], "topk_ids holds float64"),
        ([[1, -1]], [[0.5, 0.5]], [1], "topk_ids"),
        ([[1, 2**31]], [[0.5, 0.5]], [1], "topk_ids"),
        ([[1, 2]], [[0.5, 0.5]], [], "contexts"),
        ([[1, 2]], [[0.5, 0.5]], [1, -1], "contexts"),
    ],
)
def test_prune_refuses(ids, probs, context, message):
    with pytest.raises(ValueError, match=message):
        prune_tree(ids, probs, context, None, PruneConfig())


def test_encodings_of_a_chain_and_the_largest_tree():
    chain = chain_tree(9, [8, 7])
    assert ancestor_masks(chain.parents).tolist() == [1, 3, 7]
    assert token_paths(chain) == [(), (8,), (8, 7)]
    assert leaf_rows(chain).tolist() == [[0, 1, 2]]
    assert leaf_rows(chain_tree(9, [])).tolist() == [[0]]
    masks = ancestor_masks(np.arange(-1, 63))
    assert int(masks[63]) == 2**64 - 1 and masks.dtype == np.uint64
    with pytest.raises(ValueError, match="65 rows, allowed up to 64"):
        ancestor_masks(np.arange(-1, 64))


def test_compiled_functions_do_not_call_each_other_across_files():
    """numba's disk cache would not notice an edit of the callee."""
    folder = Path(__file__).parents[1] / "workbench"
    texts = {path.relative_to(folder).with_suffix("").as_posix(): path.read_text() for path in folder.rglob("*.py")}
    compiled = [n for n, text in texts.items() if re.search(r"^from (numba|workbench\.jit) ", text, re.MULTILINE)]
    compiled.remove("jit")
    assert "search/_jit" in compiled and "budget/_jit" in compiled
    others = [name.split("/")[-1] for name in compiled]
    for name in compiled:
        imports = re.findall(r"^(?:from|import) workbench\.(?!jit ).*", texts[name], re.MULTILINE)
        assert not [line for line in imports if any(re.search(rf"\b{other}\b", line) for other in others)], name
