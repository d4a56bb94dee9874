"""Pruning from arrays into arrays, and the threads that share requests out."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from workbench.search.prune import PruneConfig, TreeArrays, prune_into, prune_trees
from workbench.search.threads import SearchThreads
from workbench.search.trie import NgramTrie

CONFIG = PruneConfig(beam_width=6, num_nodes=13, eos_id=3)


def cases(count: int, levels: int = 4, width: int = 7, vocab: int = 20, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = np.array([[rng.permutation(vocab)[:width] for _ in range(levels)] for _ in range(count)], np.int32)
    probs = rng.dirichlet(np.full(width, 0.4), (count, levels)).astype(np.float32)
    return ids.reshape(count, levels, width), probs.reshape(count, levels, width), rng.integers(0, vocab, (count, 5))


@pytest.fixture(scope="module", params=[2, 3, 5])
def trie(request) -> NgramTrie:
    rng = np.random.default_rng(1)
    return NgramTrie.count((rng.zipf(1.4, (60, 40)) - 1).clip(0, 19).tolist(), order=request.param)


def poisoned(count: int) -> TreeArrays:
    out = TreeArrays.empty(count, CONFIG.num_nodes)
    for array in out:
        array.fill(-77)
    return out


def read_only(out: TreeArrays) -> TreeArrays:
    out.sizes.flags.writeable = False
    return out


@pytest.mark.parametrize("threads", [None, 1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_trees_are_those_of_single_calls(trie, count, threads):
    ids, probs, contexts = cases(count)
    lens = np.arange(count) % 5 + 1
    out = poisoned(count)
    if threads is None:
        prune_into(ids, probs, contexts, lens, trie, CONFIG, out)
    else:
        with SearchThreads(threads) as pool:
            prune_into(ids, probs, contexts, lens, trie, CONFIG, out, threads=pool)
    for r in range(count):
        (expected,) = prune_trees(ids[r : r + 1], probs[r : r + 1], [contexts[r, 5 - lens[r] :]], trie, CONFIG)
        found = out.tree(r)
        for name in ("tokens", "parents", "depths", "scores"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert (out.tokens[r, out.sizes[r] :] == -77).all(), "rows beyond the tree stay as they are"


def test_levels_and_limits_of_each_request(trie):
    ids, probs, contexts = cases(6)
    lens, levels, limits = np.full(6, 5), np.array([0, 1, 2, 3, 4, 9]), np.array([5, 1, 14, 4, 99, 0])
    out = poisoned(6)
    prune_into(ids, probs, contexts, lens, trie, CONFIG, out, levels=levels, limits=limits)
    for r in range(6):
        depth = min(int(levels[r]), 4)
        if depth == 0:
            assert out.sizes[r] == 1 and out.tokens[r, 0] == contexts[r, -1] and out.parents[r, 0] == -1
            continue
        (full,) = prune_trees(ids[r : r + 1, :depth], probs[r : r + 1, :depth], [contexts[r]], trie, CONFIG)
        assert out.sizes[r] == min(limits[r], len(full.tokens))
        assert out.tokens[r, : out.sizes[r]].tolist() == full.tokens[: limits[r]].tolist()


def test_a_tree_is_a_copy():
    ids, probs, contexts = cases(1)
    out = poisoned(1)
    prune_into(ids, probs, contexts, np.array([5]), None, CONFIG, out)
    tree = out.tree(0)
    out.tokens.fill(0)
    assert tree.tokens[1:].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk_ids": np.zeros((2, 4, 6), np.int32)}, r"topk_ids \(2, 4, 6\), topk_probs \(2, 4, 7\)"),
        ({"topk_ids": np.zeros(2, np.int32)}, r"topk_ids \(2,\), topk_probs \(2, 4, 7\)"),
        ({"topk_ids": np.full((2, 4, 7), -1)}, r"topk_ids holds int64 outside the ids, allowed 0\.\.2147483647"),
        ({"contexts": np.zeros((2, 5), np.int32)}, r"contexts is int32 \(2, 5\), allowed: int64 \[2, G >= 1\]"),
        ({"contexts": np.full((2, 5), -1)}, r"contexts end in \[-1, -1\], allowed: root ids"),
        ({"context_lens": np.array([1, 6])}, r"context_lens are \[1, 6\], allowed 1\.\.5"),
        ({"context_lens": np.array([0, 5])}, r"context_lens are \[0, 5\], allowed 1\.\.5"),
        ({"context_lens": np.array([5])}, r"context_lens is int64 \(1,\)"),
        ({"levels": np.array([1, -1])}, r"levels is \[1, -1\], allowed: 2 integers of 0 or more"),
        ({"limits": np.array([1.0, np.nan])}, r"limits is \[1\.0, nan\], allowed: 2 integers of 0 or more"),
        ({"out": read_only(TreeArrays.empty(2, 13))}, r"out\.sizes is read-only, allowed: an array to write into"),
        ({"limits": np.array([1])}, r"limits is \[1\], allowed: 2 integers"),
        ({"out": TreeArrays.empty(3, 13)}, r"out\.tokens is int32 \(3, 14\), allowed: contiguous int32 \(2, 14\)"),
        (
            {"out": TreeArrays.empty(2, 13)._replace(scores=np.zeros((2, 14)))},
            r"out\.scores is float64 \(2, 14\), allowed: contiguous float32",
        ),
    ],
)
def test_refuses_what_compiled_code_would_misread(change, message):
    ids, probs, contexts = cases(2)
    given = {"topk_ids": ids, "topk_probs": probs, "contexts": contexts, "context_lens": np.array([5, 5])}
    given |= {"trie": None, "config": CONFIG, "out": TreeArrays.empty(2, 13)}
    with pytest.raises(ValueError, match=message):
        prune_into(**(given | change))


def test_threads_take_neighbouring_parts_side_by_side():
    meet = threading.Barrier(3, timeout=10)
    parts = []

    def work(low: int, high: int) -> None:
        meet.wait()  # breaks unless three threads are here at once
        parts.append((low, high))

    with SearchThreads(3) as threads:
        threads.over(7, work)
        assert sorted(parts) == [(0, 2), (2, 4), (4, 7)]
        threads.over(0, lambda low, high: parts.append((low, high)))
    assert parts[-1] == (0, 0)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_a_thread_is_raised_after_all_have_ended(failing):
    ended = []

    def work(low: int, high: int) -> None:
        ended.append(low)
        if low == failing:
            raise RuntimeError("broken part")

    with SearchThreads(2) as threads, pytest.raises(RuntimeError, match="broken part"):
        threads.over(2, work)
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("count", [0, -1, 257, 1.5, "2", None])
def test_numbers_of_threads_that_are_refused(count):
    with pytest.raises(ValueError, match=rf"count is {count!r}, allowed: an integer in 1\.\.256"):
        SearchThreads(count)


@pytest.mark.parametrize("field", ["beam_width", "num_nodes", "eos_id"])
@pytest.mark.parametrize("value", [5.5, "5", float("nan")])
def test_settings_that_are_no_integers_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value}, allowed an integer"):
        PruneConfig(**{field: value})


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_work_behind_a_fork():
    with SearchThreads(2) as threads:
        threads.over(2, lambda low, high: None)
        child = multiprocessing.get_context("fork").Process(target=threads.over, args=(2, lambda low, high: None))
        child.start()
        child.join(20)
        alive = child.is_alive()
        child.kill()
    assert not alive and child.exitcode == 0
