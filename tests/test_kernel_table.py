"""All kernels of a round together, eagerly and in CUDA graphs, against what the engine does on the host."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, whole

from kernels.pack import pack
from kernels.ref.pack import ChainRows
from kernels.table import KERNELS
from workbench.budget import dvl
from workbench.decode.accept import accept_choices
from workbench.decode.rows import Workspace
from workbench.decode.sampling import SamplingConfig, choose
from workbench.models.cache import SlotCache
from workbench.types import chain_tree

NUM_REQUESTS, NUM_DRAFTS, VOCAB, LIVE = 4, 15, 90, 3
TEMPERATURES, SEEDS = (0.0, 1.0, 0.5, 0.0, 0.3), (0, 3, 4, 5, 6)
MAX_LEN = 60
TENSORS = ("draft_logits", "logits", "anchors", "slots", "context_len", "limits", "budget", "temperature", "seed")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_what_its_reference_takes(name):
    """And, at most, settings of its own that have defaults."""
    kernel, reference = (list(inspect.signature(function).parameters.values()) for function in KERNELS[name])
    assert [p.name for p in kernel[: len(reference)]] == [p.name for p in reference]
    assert all(p.default is not p.empty for p in kernel[len(reference) :])


class Round:
    """Inputs of one round over chains, of which the last is not there, and where its outputs go."""

    def __init__(self, seed: int) -> None:
        self.cache = SlotCache(2, len(SEEDS), MAX_LEN, 2, 4, torch.float32, DEVICE)
        self.rows = ChainRows(
            *(whole(np.zeros(8 * NUM_REQUESTS)) for _ in range(5)), starts=whole(np.zeros(NUM_REQUESTS + 1))
        )
        self.temperature, self.seed = torch.tensor(TEMPERATURES, dtype=torch.float64, device=DEVICE), whole(SEEDS)
        rng = np.random.default_rng(seed)
        peaks = rng.random((NUM_REQUESTS, NUM_DRAFTS, VOCAB)) ** 12 * 12  # a few likely tokens each
        self.draft_logits = torch.from_numpy(peaks.astype(np.float32)).to(DEVICE).flatten(0, 1)
        self.logits = torch.from_numpy(rng.standard_normal((8 * NUM_REQUESTS, VOCAB)).astype(np.float32)).to(DEVICE)
        for logits in (self.draft_logits, self.logits):
            logits[:, [7, 8]] += 12  # so that drafter and target often agree
        self.anchors, self.slots = whole(rng.integers(0, VOCAB, NUM_REQUESTS)), whole(rng.permutation(5)[:NUM_REQUESTS])
        self.context_len = whole(rng.integers(0, 30, NUM_REQUESTS))
        self.limits = whole([16] * LIVE + [0] * (NUM_REQUESTS - LIVE))
        self.budget = whole([8 * LIVE])
        self.cache.kv.copy_(torch.from_numpy(rng.standard_normal(self.cache.kv.shape)))

    def run(self) -> tuple[torch.Tensor, ...]:
        """(lengths, choices, path, num_accepted, bonus, place), from the kernels alone."""
        found = KERNELS["features"][0](self.draft_logits)
        chance = (found.values[:, 0] - found.normaliser).view(NUM_REQUESTS, NUM_DRAFTS)
        scores = chance.cumsum(-1).exp()
        lengths = KERNELS["allocate"][0](scores, self.limits, self.budget)
        drafts = found.ids.view(NUM_REQUESTS, NUM_DRAFTS, -1)[..., 0]
        pack(lengths, self.anchors, drafts, self.slots, self.context_len, MAX_LEN, self.rows)
        rows = self.rows
        choices = KERNELS["choose"][0](self.logits, rows.positions, rows.slot_of_row, self.temperature, self.seed)
        accepted = KERNELS["accept"][0](rows.tokens, rows.ancestors, rows.starts, choices, NUM_DRAFTS + 1)
        KERNELS["compact"][0](self.cache.kv, self.slots, self.context_len, accepted.path, accepted.num_accepted)
        return lengths, choices, *accepted

    def check(self, results: tuple[torch.Tensor, ...]) -> None:
        """The same round on the host, by what the policies, the workspace and the sampler do."""
        lengths, choices, path, num_accepted, bonus, place = (part.tolist() for part in results)
        log_probs = self.draft_logits.view(NUM_REQUESTS, NUM_DRAFTS, VOCAB).log_softmax(-1).max(-1)
        scores = log_probs.values.cumsum(-1).exp().cpu().numpy()
        assert lengths == dvl.allocate(scores, int(self.budget), limits=self.limits.cpu().numpy()).tolist()
        anchors, slots, contexts = (t.tolist() for t in (self.anchors, self.slots, self.context_len))
        chains = [
            chain_tree(anchors[r], log_probs.indices[r, : lengths[r] - 1].tolist())
            for r in range(sum(map(bool, lengths)))
        ]
        live = len(chains)
        space = Workspace(NUM_REQUESTS, 8 * NUM_REQUESTS, MAX_LEN, torch.device("cpu"))
        space.pack(chains, slots[:live], contexts[:live], 8 * NUM_REQUESTS)
        for name in ChainRows._fields:
            assert torch.equal(getattr(self.rows, name).cpu(), getattr(space, name)), name
        starts = space.starts.tolist()
        for r, chain in enumerate(chains):
            own = slice(starts[r], starts[r + 1])
            config = SamplingConfig(temperature=float(self.temperature[slots[r]]), seed=int(self.seed[slots[r]]))
            want = choose(self.logits[own].cpu(), contexts[r] + chain.depths + 1, config)
            assert choices[own] == want.tolist()
            got = accept_choices(chain, want)
            assert (tuple(path[r][: num_accepted[r] + 1]), bonus[r]) == (got.path, got.bonus)
            kept = len(got.path)  # of a chain, the first rows
            assert place[own] == [*range(kept), *[-1] * (len(chain.tokens) - kept)]
        assert place[starts[live] :] == [-1] * (8 * NUM_REQUESTS - starts[live])
        assert num_accepted[live:] == bonus[live:] == [0] * (NUM_REQUESTS - live)


@pytest.mark.parametrize("seed", range(3))
def test_a_round_equals_the_engines(seed):
    one = Round(seed)
    before = one.cache.kv.clone()
    one.check(one.run())
    assert torch.equal(one.cache.kv, before)  # accepted chains lie where they belong


def test_rounds_accept_something():
    assert sum(int(Round(seed).run()[3].sum()) for seed in range(2)) >= 3


@pytest.mark.gpu
def test_one_graph_serves_every_round():
    fixed = Round(0)
    graph, results = captured(fixed.run)
    for seed in range(1, 8):
        new = Round(seed)
        if seed % 2:
            new.limits, new.budget = whole([16, 3, 16, 16]), whole([32])
        for name in TENSORS:
            getattr(fixed, name).copy_(getattr(new, name))
        graph.replay()
        fixed.check(results)
