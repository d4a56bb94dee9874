"""Rounds that can be repeated as they are: contexts of random tokens that never grow, and the arms that run them.

What is accepted is written behind the contexts as in earnest, but requests are not told, so the next round starts from
the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from workbench.budget.table import build_policy
from workbench.decode.captured import CapturedRound
from workbench.decode.live import LiveRequest, Request
from workbench.decode.round import RoundParts
from workbench.decode.rows import Workspace
from workbench.decode.sampling import SamplingConfig
from workbench.decode.stopping import stop_rules
from workbench.drafters.ar import ArDrafter
from workbench.drafters.dart import DartDrafter, dart_taps
from workbench.drafters.dflash import DFlashDrafter
from workbench.drafters.shapes import random_dart, random_dflash, random_scorer
from workbench.measure.latency_plan import ARMS, BLOCK_SIZE, Arm
from workbench.measure.timer import StageTimer
from workbench.models.cache import SlotCache
from workbench.models.target import Target
from workbench.search.trie import NgramTrie
from workbench.types import MAX_TREE_ROWS, Commit, Drafter, DraftSession

#: Tokens that a request may still emit: more than any draft is deep.
_ROOM = 2 * MAX_TREE_ROWS
#: Random tokens that the n-gram trie of DART's search is counted over.
TRIE_TOKENS = 50_000


def arm_drafters(target: Target, mean_rows: int, seed: int) -> dict[str, Drafter]:
    """A drafter of random weights for every arm; networks are shared.

    Args:
        target: with published sizes.
        mean_rows: verified rows a request of DScale.
        seed: of all weights.
    """
    scorer, network = random_scorer(target, BLOCK_SIZE, seed), random_dflash(target, seed, block_size=BLOCK_SIZE)
    policies = {"DFlash": build_policy("full"), "DScale": build_policy("dvl", mean_rows, scorer)}
    dart = dart_drafter(target, seed)
    drafters: dict[str, Drafter] = {}
    for name, arm in ARMS.items():
        if arm.method in policies:
            policy = policies[arm.method]
            drafters[name] = DFlashDrafter(network, target.embedding, target.lm_head, policy, tile=arm.tile)
        elif arm.method == "DART":
            drafters[name] = DartDrafter(dart.model, dart.embedding, dart.taps, dart.trie, search=arm.search)
        else:
            drafters[name] = ArDrafter()
    return drafters


def dart_drafter(target: Target, seed: int) -> DartDrafter:
    """DART of random weights, with a trie over random tokens."""
    tokens = np.random.default_rng(seed).integers(0, target.vocab_size, TRIE_TOKENS)
    trie = NgramTrie.count([tokens], order=3, vocab_size=target.vocab_size)
    return DartDrafter(random_dart(target, seed), target.embedding, dart_taps(target.num_layers), trie)


@dataclass(frozen=True)
class Step:
    """One round.

    Attributes:
        seconds: of the host, from the call to its return.
        stage_s: seconds by stage.
        rows: rows that the target ran.
    """

    seconds: float
    stage_s: dict[str, float]
    rows: int


class RepeatedRound:
    """One arm's round over requests of one context, again and again.

    Args:
        target: that of the arm.
        drafter: that of the arm.
        cache: of the target; its contexts need not be anything in particular.
        arm: what is captured.
        requests: N.
        context: committed tokens of each.
        steps: most rounds that will be run.
        seed: of the tokens.

    Attributes:
        round: the round itself, with its graphs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: SlotCache,
        arm: Arm,
        requests: int,
        context: int,
        steps: int,
        seed: int,
    ) -> None:
        most = 1 + drafter.max_nodes
        # The session counts what is accepted, though the context stays.
        session = drafter.session(requests, context + steps * most + MAX_TREE_ROWS)
        self._timer = StageTimer(target.device)
        workspace = Workspace(requests, requests * most, cache.max_len, target.device)
        parts = RoundParts(target, drafter, cache, session, workspace, self._timer)
        self.round = CapturedRound(parts, cache.max_len, arm.capture)
        self._live = random_requests(target, requests, context, seed)
        observe_random(target, drafter, session, self._live, seed)

    def step(self) -> Step:
        """Runs it once."""
        self._timer.reset()
        begin = perf_counter()
        result = self.round.run(self._live)
        seconds = perf_counter() - begin
        return Step(seconds, self._timer.take(), result.num_rows)


def random_requests(target: Target, requests: int, context: int, seed: int) -> list[LiveRequest]:
    """Greedy requests right behind their prefill: `context` random tokens, and the first one of the output."""
    rng, sampling = np.random.default_rng(seed), SamplingConfig(max_new_tokens=_ROOM, stop_ids=())
    live = []
    for slot in range(requests):
        *prompt, first = rng.integers(0, target.vocab_size, context + 1).tolist()
        rules = stop_rules(sampling, (), _ROOM, target.decode)
        live.append(LiveRequest.enter(slot, slot, Request(tuple(prompt), sampling), rules))
        live[-1].extend([first])
    return live


@torch.inference_mode()
def observe_random(target: Target, drafter: Drafter, session: DraftSession, live: list[LiveRequest], seed: int) -> None:
    """Tells a session the committed tokens, with random hidden states; one request at a time, as they are large."""
    generator = torch.Generator(target.device).manual_seed(seed)
    width = len(drafter.taps) * target.hidden_size
    for x in live:
        taps = None
        if drafter.taps:
            taps = torch.empty(x.committed, width, dtype=target.dtype, device=target.device)
            taps.normal_(generator=generator)
        tokens, following = x.tokens[: x.committed], int(x.tokens[x.committed])
        session.observe(Commit([x.slot], [0], [tokens], [following], taps))
