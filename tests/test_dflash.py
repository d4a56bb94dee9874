"""The DFlash drafter against a plain restatement of the training forward, and its proposals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from dflash_setup import CONFIG, HIDDEN, VOCAB, random_dflash, random_network, restated_hidden
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.budget.policy import BudgetPolicy
from workbench.budget.table import build_policy
from workbench.decode.engine import generate
from workbench.decode.sampling import SamplingConfig
from workbench.drafters.dflash import DFlashDrafter, build_dflash
from workbench.drafters.dflash_model import DFlashModel
from workbench.models.packed import causal_rows
from workbench.types import Commit, DraftRequest, Signals

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TAP_WIDTH = len(CONFIG.target_layer_ids) * HIDDEN
SHIFTED = dataclasses.replace(CONFIG, shifted=True)


class NoTimer:
    """Records which stages were timed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str):
        self.names.append(name)
        return nullcontext()


def embedding_and_head(seed: int = 1) -> tuple[nn.Embedding, nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    table, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        table.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
        head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    return table.requires_grad_(False), head.requires_grad_(False)


class Story:
    """One token sequence with its taps."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length + 1,), generator=generator).numpy()
        self.taps = torch.randn(length + 1, TAP_WIDTH, generator=generator)

    def commit(self, slot: int, start: int, stop: int) -> Commit:
        return Commit([slot], [start], [self.tokens[start:stop]], [int(self.tokens[stop])], self.taps[start:stop])

    def expected(self, model: DFlashModel, *anchors: int) -> torch.Tensor:
        """[N, slots, H] of blocks at these positions, from one pass over the whole story."""
        table, _ = embedding_and_head()
        return restated_hidden(model, table.weight, self.tokens.tolist(), self.taps, anchors)


def drafter(model: DFlashModel | None = None, policy=None, num_drafts: int | None = None) -> DFlashDrafter:
    return DFlashDrafter(model or random_network(), *embedding_and_head(), policy or build_policy("full"), num_drafts)


def filled(session, stories: dict[int, Story]) -> None:
    """Commits all stories but their last tokens, in one call."""
    session.observe(
        Commit(
            list(stories),
            [0] * len(stories),
            [s.tokens[:-1] for s in stories.values()],
            [int(s.tokens[-1]) for s in stories.values()],
            torch.cat([s.taps[:-1] for s in stories.values()]),
        )
    )


@pytest.mark.parametrize("config", [CONFIG, SHIFTED], ids=["same position", "shifted"])
def test_every_round_equals_one_training_pass_over_the_sequence(config):
    model, story = random_network(config), Story(16, seed=3)
    session = drafter(model).session(2, 20)
    stops = (5, 6, 9, 10, 14)  # a prompt of 5, then rounds that commit 1, 3, 1 and 4 tokens
    expected = story.expected(model, *stops)[:, 0 if config.shifted else 1 :]
    _, head = embedding_and_head()
    start = 0
    for i, stop in enumerate(stops):
        session.observe(story.commit(1, start, stop))
        start = stop
        for _ in range(2):  # the first block must leave no trace
            hidden, logits = session.draft([1], [int(story.tokens[stop])])
            torch.testing.assert_close(hidden[0], expected[i], **CLOSE)
            torch.testing.assert_close(logits[0], expected[i] @ head.weight.T, rtol=1e-4, atol=1e-4)
    assert hidden.shape[1] == config.num_drafts


def test_a_slot_sees_the_masks_behind_it():
    story = Story(6, seed=3)
    found = []
    for num_drafts in (4, 3):
        session = drafter(num_drafts=num_drafts).session(1, 8)
        filled(session, {0: story})
        found.append(session.draft([0], [int(story.tokens[6])])[0])
    assert ((found[0][:, :3] - found[1]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("lengths", [(3, 12, 7, 1), (6, 6, 6, 6)], ids=["ragged", "equal"])
def test_requests_share_one_forward_and_each_gets_what_it_gets_alone(lengths):
    model = random_network()
    stories = dict(zip((2, 0, 5, 3), [Story(n, seed=n + i) for i, n in enumerate(lengths)], strict=True))
    session = drafter(model).session(6, 16)
    filled(session, stories)
    anchors = [int(s.tokens[-1]) for s in stories.values()]
    hidden, logits = session.draft(list(stories), anchors)
    for row, (slot, story) in enumerate(stories.items()):
        torch.testing.assert_close(hidden[row], story.expected(model, len(story.tokens) - 1)[0, 1:], **CLOSE)
        alone = session.draft([slot], [anchors[row]])
        torch.testing.assert_close(hidden[row], alone[0][0], **CLOSE)
        torch.testing.assert_close(logits[row], alone[1][0], rtol=1e-4, atol=1e-4)


def test_operations_of_a_forward_do_not_grow_with_its_requests():
    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls[str(func)] += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for num_requests in (2, 6):
        session = drafter().session(6, 16)
        filled(session, {slot: Story(4 + slot, seed=slot) for slot in range(num_requests)})
        with Count() as counter:
            session.draft(list(range(num_requests)), [1] * num_requests)
        counts.append(counter.calls)
    assert counts[0] == counts[1] and counts[0].total() > 50


def test_prompt_chunks_and_other_slots_make_no_difference():
    model, story, other = random_network(), Story(13, seed=7), Story(9, seed=8)
    session = drafter(model).session(2, 16)
    for start, stop in ((0, 4), (4, 5), (5, 13)):
        session.observe(story.commit(0, start, stop))
        if stop < 9:
            session.observe(other.commit(1, start, stop))
    hidden, _ = session.draft([0], [int(story.tokens[13])])
    torch.testing.assert_close(hidden, story.expected(model, 13)[:, 1:], **CLOSE)


def test_a_slot_starts_anew_at_position_0():
    model, story = random_network(), Story(4, seed=2)
    session = drafter(model).session(1, 16)
    session.observe(Story(15, seed=1).commit(0, 0, 15))
    session.draft([0], [3])
    session.observe(story.commit(0, 0, 4))
    hidden, _ = session.draft([0], [int(story.tokens[4])])
    torch.testing.assert_close(hidden, story.expected(model, 4)[:, 1:], **CLOSE)


@pytest.mark.parametrize("slots", [(1,), (1, 3), (3, 1, 2)])
def test_rows_that_are_not_committed_are_never_visible(slots):
    model = random_network()
    session = drafter(model).session(5, 16)
    stories = {slot: Story(3 + 2 * slot, seed=slot) for slot in slots}
    filled(session, stories)
    kept = {slot: session._cache.kv[:, :, slot, : len(s.taps) - 1].clone() for slot, s in stories.items()}
    with torch.inference_mode():
        session._cache.kv.fill_(torch.nan)
        for slot, rows in kept.items():
            session._cache.kv[:, :, slot, : rows.shape[2]] = rows
    hidden, _ = session.draft(list(slots), [int(s.tokens[-1]) for s in stories.values()])
    for row, story in zip(hidden, stories.values(), strict=True):
        torch.testing.assert_close(row, story.expected(model, len(story.tokens) - 1)[0, 1:], **CLOSE)


def test_the_last_position_of_the_cache_can_draft():
    model, story = random_network(), Story(9, seed=5)
    session = drafter(model).session(2, 9)
    filled(session, {1: story, 0: Story(2, seed=6)})
    for slots in ([1], [0, 1]):
        hidden, _ = session.draft(slots, [int(story.tokens[9])] * len(slots))
        torch.testing.assert_close(hidden[-1:], story.expected(model, 9)[:, 1:], **CLOSE)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_smaller_block_is_a_block_of_fewer_masks(num_drafts):
    model, story = random_network(), Story(6, seed=9)
    session = drafter(model, num_drafts=num_drafts).session(1, 8)
    filled(session, {0: story})
    hidden, _ = session.draft([0], [int(story.tokens[6])])
    smaller = random_network(dataclasses.replace(CONFIG, block_size=num_drafts + 1))
    torch.testing.assert_close(hidden, story.expected(smaller, 6)[:, 1:], **CLOSE)


def test_sizes_out_of_range_are_refused():
    for num_drafts in (0, 5):
        with pytest.raises(ValueError, match=f"num_drafts={num_drafts} outside 1..4"):
            drafter(num_drafts=num_drafts)
    assert drafter(random_network(SHIFTED), num_drafts=5).block_size == 5
    for slots, max_len in ((0, 4), (1, 0)):
        with pytest.raises(ValueError, match="allowed: 1 or more"):
            drafter().session(slots, max_len)


@pytest.mark.parametrize("start, stop", [(3, 5), (1, 2), (4, 11)])
def test_chunks_that_do_not_continue_the_slot_are_refused(start, stop):
    story = Story(12, seed=5)
    session = drafter().session(1, 10)
    session.observe(story.commit(0, 0, 4))
    with pytest.raises(ValueError, match=r"slot 0: \d+ tokens from position"):
        session.observe(story.commit(0, start, stop))


def test_missing_or_misshaped_taps_are_refused():
    story = Story(4, seed=5)
    session = drafter().session(1, 10)
    commit = story.commit(0, 0, 4)
    for taps in (None, story.taps[:3], story.taps[:4, :-1]):
        with pytest.raises(ValueError, match="taps"):
            session.observe(Commit(commit.slots, commit.starts, commit.tokens, commit.next_tokens, taps))
    with pytest.raises(ValueError, match="no committed tokens"):
        session.draft([0], [1])


def request(slot: int, max_nodes: int = 63, max_depth: int = 99) -> DraftRequest:
    return DraftRequest(slot, Story(6 + slot, seed=slot).tokens.astype(np.int64), max_nodes, max_depth)


def proposals(requests, policy=None):
    session = drafter(policy=policy).session(4, 16)
    filled(session, {slot: Story(6 + slot, seed=slot) for slot in range(4)})
    timer = NoTimer()
    return session.propose(requests, timer), timer.names, session


def test_chains_respect_the_limits_of_each_request():
    requests = [request(0), request(1, max_nodes=3), request(2, max_depth=2), request(3, max_nodes=0)]
    requests.append(request(3, max_depth=0))
    trees, stages, session = proposals(requests)
    assert [t.num_nodes for t in trees] == [4, 3, 2, 0, 0] and all(t.is_chain for t in trees)
    assert stages == ["draft"]
    assert [int(t.tokens[0]) for t in trees] == [int(r.tokens[-1]) for r in requests]
    _, logits = session.draft([0, 1, 2], [int(r.tokens[-1]) for r in requests[:3]])
    for tree, drafted in zip(trees, logits.argmax(-1).tolist(), strict=False):
        assert tree.tokens[1:].tolist() == drafted[: tree.num_nodes]


def test_nothing_to_draft_costs_no_forward():
    _, stages, _ = proposals([request(1, max_nodes=0), request(2, max_depth=0)])
    assert stages == []


def test_a_limit_does_not_change_what_is_drafted():
    whole, _, _ = proposals([request(1)])
    cut, _, _ = proposals([request(1, max_depth=2)])
    assert cut[0].tokens.tolist() == whole[0].tokens[:3].tolist()
    np.testing.assert_array_equal(cut[0].scores, whole[0].scores[:3])


def test_without_a_scorer_nodes_carry_the_log_probability_of_their_chain():
    trees, _, session = proposals([request(2), request(0)], build_policy("shared"))
    _, logits = session.draft([2, 0], [int(t.tokens[0]) for t in trees])
    best = logits.log_softmax(-1).amax(-1).cumsum(-1)
    for tree, expected in zip(trees, best.numpy(), strict=True):
        np.testing.assert_allclose(tree.scores[1:], expected, rtol=1e-4)
        assert tree.scores[0] == 0
    trees, _, _ = proposals([request(2)], build_policy("uniform"))
    assert not trees[0].scores.any(), "nobody reads them"


def test_a_scorer_sees_the_signals_and_its_scores_are_used():
    seen: list[Signals] = []

    def scorer(signals: Signals) -> np.ndarray:
        seen.append(signals)
        return np.linspace(0.9, 0.1, signals.tokens.numel(), dtype=np.float32).reshape(signals.tokens.shape)

    policy = BudgetPolicy("full", build_policy("full").allocator, scorer=scorer)
    requests = [request(1), request(0, max_nodes=0), request(3, max_depth=2)]
    trees, stages, session = proposals(requests, policy)
    assert stages == ["draft", "allocate"]
    (signals,) = seen
    assert [r.slot for r in signals.requests] == [1, 3]
    hidden, logits = session.draft([1, 3], [int(requests[0].tokens[-1]), int(requests[2].tokens[-1])])
    assert torch.equal(signals.hidden, hidden) and torch.equal(signals.logits, logits)
    assert torch.equal(signals.tokens, logits.argmax(-1)) and signals.tokens.dtype == torch.int64
    all_scores = np.linspace(0.9, 0.1, 8, dtype=np.float32)
    np.testing.assert_array_equal(trees[0].scores, np.append(np.float32(0), all_scores[:4]))
    np.testing.assert_array_equal(trees[2].scores, np.append(np.float32(0), all_scores[4:6]))


def test_a_request_out_of_step_with_the_cache_is_refused():
    late = request(1)
    late = DraftRequest(1, late.tokens[:-1], 9, 9)
    with pytest.raises(ValueError, match="slot 1: 7 tokens; needed: the 7 committed and the root"):
        proposals([late])


def test_the_head_is_shared_unless_the_network_has_another_dtype():
    table, head = embedding_and_head()
    model = random_network()
    same = DFlashDrafter(model, table, head, build_policy("full"))
    assert same._head_weight.data_ptr() == head.weight.data_ptr()
    short = DFlashDrafter(random_network().bfloat16(), table, head, build_policy("full"))
    story = Story(6, seed=4)
    found = []
    for one in (same, short):
        session = one.session(1, 8)
        filled(session, {0: story})
        found.append(session.draft([0], [int(story.tokens[-1])]))
    assert found[1][0].dtype == torch.bfloat16 and found[1][1].dtype == torch.float32
    assert (found[0][1] - found[1][1]).abs().max() < 0.1 * found[0][1].abs().max()


def test_a_head_with_a_bias():
    table, _ = embedding_and_head()
    head = nn.Linear(HIDDEN, VOCAB)
    one = DFlashDrafter(random_network(), table, head, build_policy("full"))
    hidden = torch.randn(2, 4, HIDDEN)
    torch.testing.assert_close(one.logits(hidden), head(hidden))


def test_a_rollout_of_the_engine_drafts_what_one_training_pass_says(target, tmp_path):
    built = build_dflash(target, random_dflash(target, tmp_path), dtype="float32")
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    results = generate(target, built, prompts, SamplingConfig(max_new_tokens=12), slots=2, trace=True)
    rounds = 0
    for prompt, result in zip(prompts, results, strict=True):
        tokens = prompt + result.token_ids
        taps = target.forward(causal_rows(tokens, 0, 0, target.device), target.new_cache(1, len(tokens)), built.taps)
        anchors = np.cumsum([len(prompt)] + [r.num_emitted for r in result.rounds[:-1]]).tolist()
        hidden = restated_hidden(built.model, target.embedding.weight, tokens, taps.taps, anchors)
        expected = (hidden[:, 1:] @ target.lm_head.weight.T).argmax(-1)
        for stats, chain in zip(result.rounds, expected.tolist(), strict=True):
            assert stats.tree.tokens[1:].tolist() == chain[: stats.tree.num_nodes]
            rounds += stats.tree.num_nodes > 0
    assert rounds > 15
