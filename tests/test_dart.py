"""The DART drafter against a plain restatement of the published forward, and its proposals."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from dart_setup import HIDDEN, VOCAB, random_model
from torch import nn

from workbench.drafters.dart import DartDrafter
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.types import Commit, DraftRequest


class NoTimer:
    """Records which stages were timed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str):
        self.names.append(name)
        return nullcontext()


def embedding(seed: int = 1) -> nn.Embedding:
    table = nn.Embedding(VOCAB, HIDDEN)
    with torch.no_grad():
        table.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed)))
    return table.requires_grad_(False)


def restated_logits(weights: dict, config: DartConfig, taps, next_embeddings, double_norm: bool = True):
    """[d, V_d]: the whole published forward of one prefix, all rows, all queries, no cache."""

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weights[name]

    n, m = len(taps), config.draft_length
    g = taps @ weights["fc.weight"].T
    real = torch.cat(
        [norm(next_embeddings, "midlayer.input_layernorm.weight"), norm(g, "midlayer.hidden_norm.weight")], -1
    )
    mask_rep = weights["midlayer.mask_rep"]
    x = torch.cat([real, mask_rep.repeat(m, 1)])
    residual = torch.cat([g, mask_rep[:HIDDEN].repeat(m, 1)])
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    turn = torch.polar(torch.ones(()).double(), torch.arange(n + m).double()[:, None] * frequencies)

    def rotated(v):  # pairs (j, j + head_dim / 2) as complex numbers
        half = config.head_dim // 2
        z = torch.complex(v[..., :half].double(), v[..., half:].double()) * turn[:, None]
        return torch.cat([z.real, z.imag], -1).float()

    heads = {p: (x @ weights[f"midlayer.self_attn.{p}_proj.weight"].T).view(n + m, -1, config.head_dim) for p in "qkv"}
    q, k, v = rotated(heads["q"]), rotated(heads["k"]), heads["v"]
    out = torch.zeros(n + m, config.num_attention_heads, config.head_dim)
    share = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        for row in range(n + m):
            scores = k[: row + 1, head // share] @ q[row, head] / config.head_dim**0.5
            out[row, head] = scores.softmax(0) @ v[: row + 1, head // share]
    y = (residual + out.flatten(1) @ weights["midlayer.self_attn.o_proj.weight"].T)[-(m + 1) :]
    inner = norm(y, "midlayer.post_attention_layernorm.weight")
    gate = inner @ weights["midlayer.mlp.gate_proj.weight"].T
    up = inner @ weights["midlayer.mlp.up_proj.weight"].T
    y = y + (gate * gate.sigmoid() * up) @ weights["midlayer.mlp.down_proj.weight"].T
    y = norm(y, "norm.weight")
    y = norm(y, "norm.weight") if double_norm else y
    return y @ weights["lm_head.weight"].T


class Story:
    """One token sequence with its taps."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length + 1,), generator=generator).numpy()
        self.taps = torch.randn(length, 3 * HIDDEN, generator=generator)

    def commit(self, slot: int, start: int, stop: int) -> Commit:
        return Commit([slot], [start], [self.tokens[start:stop]], [int(self.tokens[stop])], self.taps[start:stop])

    def expected(self, model: DartModel, table: nn.Embedding, length: int) -> torch.Tensor:
        next_ids = torch.from_numpy(self.tokens[1 : length + 1])
        return restated_logits(model.state_dict(), model.config, self.taps[:length], table(next_ids), model.double_norm)


def drafter(model: DartModel | None = None, **options) -> DartDrafter:
    return DartDrafter(model or random_model(), embedding(), (2, 4, 5), **options)


@pytest.mark.parametrize("double_norm", [True, False])
def test_logits_equal_the_published_forward_at_every_prefix(double_norm):
    model, table, story = random_model(double_norm=double_norm), embedding(), Story(14, seed=3)
    session = drafter(model).session(2, 20)
    start = 0
    for stop in (5, 6, 9, 10, 14):  # a prefill of 5, then rounds that commit 1, 3, 1 and 4 tokens
        session.observe(story.commit(1, start, stop))
        start = stop
        torch.testing.assert_close(session.logits([1])[0], story.expected(model, table, stop), rtol=1e-4, atol=1e-4)
        session.logits([1])  # masks must leave no trace


def test_the_second_norm_matters():
    story = Story(6, seed=3)
    sessions = [drafter(random_model(double_norm=double)).session(1, 8) for double in (True, False)]
    for session in sessions:
        session.observe(story.commit(0, 0, 6))
    assert (sessions[0].logits([0]) - sessions[1].logits([0])).abs().max() > 0.1


def test_requests_of_different_lengths_share_one_forward():
    model, table = random_model(), embedding()
    stories = [Story(n, seed=n) for n in (3, 12, 7)]
    session = drafter(model).session(4, 16)
    slots = [2, 0, 3]
    session.observe(
        Commit(
            slots,
            [0, 0, 0],
            [s.tokens[:-1] for s in stories],
            [int(s.tokens[-1]) for s in stories],
            torch.cat([s.taps for s in stories]),
        )
    )
    got = session.logits(slots)
    for row, story in enumerate(stories):
        torch.testing.assert_close(got[row], story.expected(model, table, len(story.taps)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(session.logits([3]), got[2:], rtol=1e-4, atol=1e-4)


def test_a_slot_starts_anew_at_position_0():
    model, table = random_model(), embedding()
    session = drafter(model).session(1, 16)
    session.observe(Story(15, seed=1).commit(0, 0, 15))
    session.logits([0])
    story = Story(4, seed=2)
    session.observe(story.commit(0, 0, 4))
    torch.testing.assert_close(session.logits([0])[0], story.expected(model, table, 4), rtol=1e-4, atol=1e-4)


def test_the_last_position_of_the_cache_can_draft():
    model, table, story = random_model(), embedding(), Story(9, seed=5)
    session = drafter(model).session(1, 9)
    session.observe(story.commit(0, 0, 9))
    torch.testing.assert_close(session.logits([0])[0], story.expected(model, table, 9), rtol=1e-4, atol=1e-4)


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
    for taps in (None, story.taps[:3], story.taps[:, :-1]):
        with pytest.raises(ValueError, match="taps"):
            session.observe(Commit(commit.slots, commit.starts, commit.tokens, commit.next_tokens, taps))
    with pytest.raises(ValueError, match="no committed tokens"):
        session.logits([0])


def proposals(requests, **options):
    model = random_model()
    session = drafter(model, **options).session(4, 16)
    for slot in range(4):
        session.observe(Story(6 + slot, seed=slot).commit(slot, 0, 6 + slot))
    timer = NoTimer()
    return session.propose(requests, timer), timer.names, session


def request(slot: int, max_nodes: int = 59, max_depth: int = 99) -> DraftRequest:
    return DraftRequest(slot, Story(6 + slot, seed=slot).tokens.astype(np.int64), max_nodes, max_depth)


def test_trees_respect_the_limits_of_each_request():
    requests = [request(0), request(1, max_nodes=3), request(2, max_depth=2), request(3, max_nodes=0)]
    trees, stages, _ = proposals([*requests, request(3, max_depth=0)], prune=PruneConfig(num_nodes=30))
    assert [t.num_nodes for t in trees] == [30, 3, 30, 0, 0]
    assert [int(t.depths.max()) for t in trees[2:]] == [2, 0, 0]
    assert stages[0] == "draft" and set(stages[1:]) == {"search"}
    assert [int(t.tokens[0]) for t in trees] == [int(r.tokens[-1]) for r in [*requests, request(3)]]


def test_nothing_to_draft_costs_no_forward():
    _, stages, _ = proposals([request(1, max_nodes=0), request(2, max_depth=0)])
    assert stages == []


def test_candidates_are_target_ids_with_probabilities_over_the_kept_ones():
    trees, _, session = proposals([request(2)])
    ids, probs = session._candidates([2])
    logits = session.logits([2])[0]
    order = logits.argsort(dim=-1, descending=True)[:, :25]
    torch.testing.assert_close(torch.from_numpy(ids[0]), session._model.draft_ids[order])
    torch.testing.assert_close(torch.from_numpy(probs[0]), logits.gather(1, order).softmax(-1), rtol=1e-4, atol=1e-6)
    allowed = set(session._model.draft_ids.tolist())
    assert set(trees[0].tokens[1:].tolist()) <= allowed
    assert trees[0].tokens[1] == ids[0, 0, 0]


def test_the_trie_changes_the_tree():
    plain, _, session = proposals([request(2)])
    ids, _ = session._candidates([2])
    unlikely = int(ids[0, 1, 20])
    trie = NgramTrie.count([[int(request(2).tokens[-1]), int(ids[0, 0, 0]), unlikely]], order=3)
    helped, _, _ = proposals([request(2)], trie=trie)
    assert helped[0].tokens[helped[0].depths == 2][0] == unlikely
    assert plain[0].tokens[plain[0].depths == 2][0] != unlikely
