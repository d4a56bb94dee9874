"""DART as a drafter: one forward of the draft network proposes all positions, an n-gram trie helps to prune the tree.

Follows arXiv 2601.19278 and the inference code of its repository, with two savings: real rows are projected to K/V
once, when they are committed, and only the newest real row and the masks have queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from workbench.budget.table import build_policy, build_tree_policy
from workbench.drafters.committed import committed_rows
from workbench.drafters.dart_device import CandidatesOf, DartDeviceSession
from workbench.drafters.dart_files import load_dart
from workbench.drafters.dart_model import DartModel
from workbench.drafters.dart_state import DartState, num_candidates
from workbench.drafters.device_search import DeviceSearch, resolve_search
from workbench.drafters.dtype_option import resolve_dtype
from workbench.drafters.layers import rotate
from workbench.drafters.trie_option import TRIE, resolve_trie
from workbench.drafters.weights_option import require_fit, weights_folder
from workbench.models.target import Target
from workbench.search.prune import PruneConfig, TreeArrays, context_tails, prune_into
from workbench.search.threads import SearchThreads
from workbench.search.trie import NgramTrie
from workbench.types import Commit, DraftRequest, DraftTree, Policy, Stopwatch, root_tree


class DartDrafter:
    """Weights and settings of DART; state lives in its sessions.

    Args:
        model: the draft network, on the target's device.
        embedding: the target's input embedding.
        taps: three indices into the target's hidden states, ascending.
        trie: n-gram counts; None searches without them.
        prune: settings of the search.
        policy: decides how much is verified; default everything.
        search: where rounds on the device search, see `build_dart`; others search on the host.
        search_threads: share the requests of a search on the host; None for the engine's own thread.

    Attributes:
        search: "host" or "device".

    Raises:
        ValueError: `search` is unknown.
    """

    name = "dart"

    def __init__(
        self,
        model: DartModel,
        embedding: nn.Embedding,
        taps: tuple[int, int, int],
        trie: NgramTrie | None = None,
        prune: PruneConfig | None = None,
        policy: Policy | None = None,
        search: str = "host",
        search_threads: SearchThreads | None = None,
    ) -> None:
        self.model = model
        self.embedding = embedding
        self.taps = taps
        self.trie = trie
        self.prune = prune or PruneConfig()
        self.max_nodes = self.prune.num_nodes
        self.policy = policy or build_policy("full")
        self.search = resolve_search(search, model.fc.weight.device)
        self.search_threads = search_threads

    @cached_property
    def device_search(self) -> DeviceSearch:
        """The search on the device, with the one copy of the trie there that all sessions share."""
        return DeviceSearch(self.trie, self.prune, self.model.fc.weight.device)

    def session(self, slots: int, max_len: int) -> DartSession:
        """New state for `slots` requests of up to `max_len` tokens each."""
        return DartSession(self, slots, max_len)


class DartSession:
    """Rounds on the host over a `DartState`."""

    @torch.inference_mode()
    def __init__(self, drafter: DartDrafter, slots: int, max_len: int) -> None:
        model = drafter.model
        self._drafter, self._model = drafter, model
        self._device = model.fc.weight.device
        self._state = DartState(model, slots, max_len)
        self._keys, self._values = self._state.cache.layer(0)
        self._steps = torch.arange(model.config.depth, device=self._device)
        self._draft_ids = model.draft_ids

    def on_device(self) -> DartDeviceSession:
        """The part that can be captured, over the same state."""
        drafter = self._drafter
        search = drafter.device_search if drafter.search == "device" else None
        return DartDeviceSession(self._model, drafter.embedding, self._state, self._search, search)

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Adds committed tokens as real rows.

        Raises:
            ValueError: no taps, a chunk that does not continue its slot, or one beyond `max_len`.
        """
        model, state, dtype = self._model, self._state, self._keys.dtype
        rows = committed_rows(commit, state.lengths, state.max_len, model.fc.in_features, self._device)
        parts = [np.append(t[1:], n) for t, n in zip(commit.tokens, commit.next_tokens, strict=True)]
        next_ids = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self._device)
        embeddings = self._drafter.embedding(next_ids).to(dtype)
        features, inputs = model.real_rows(commit.taps.to(self._device, dtype), embeddings)
        keys, values = model.key_value(inputs)
        places = rows.slot_of_row, rows.positions
        self._keys[places] = rotate(keys, state.cos[rows.positions], state.sin[rows.positions])
        self._values[places] = values
        newest = torch.from_numpy(np.cumsum(rows.counts) - 1).to(self._device)
        moved = torch.from_numpy(rows.slots).to(self._device)
        query = model.query(inputs[newest]).flatten(1)
        state.newest[moved] = torch.cat([features[newest], query], dim=1)
        state.lengths[rows.slots] = rows.ends

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """One pruned tree a request, from one forward for all of them."""
        return self._search(requests, lambda drafting: self._candidates([requests[i].slot for i in drafting]), timer)

    def _search(
        self, requests: Sequence[DraftRequest], candidates_of: CandidatesOf, timer: Stopwatch
    ) -> list[DraftTree]:
        """One tree a request; candidates are asked for once, if any request can use a draft."""
        depth = self._model.config.depth
        limits = [0 if r.max_nodes < 1 else max(0, min(r.max_depth, depth)) for r in requests]
        drafting = [i for i, limit in enumerate(limits) if limit]
        trees = [root_tree(int(r.tokens[-1])) for r in requests]
        if not drafting:
            return trees
        with timer.stage("draft"):
            ids, probs = candidates_of(drafting)
        with timer.stage("search"):
            drafter, chosen = self._drafter, [requests[i] for i in drafting]
            tails = context_tails([r.tokens for r in chosen], 1 if drafter.trie is None else drafter.trie.order - 1)
            levels, rows = np.array([limits[i] for i in drafting]), np.array([1 + r.max_nodes for r in chosen])
            out = TreeArrays.empty(len(chosen), drafter.prune.num_nodes)
            prune_into(ids, probs, *tails, drafter.trie, drafter.prune, out, levels, rows, drafter.search_threads)
            for k, i in enumerate(drafting):
                trees[i] = out.tree(k)
        return trees

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> torch.Tensor:
        """Draft logits behind the newest committed token of each slot, in one forward.

        Returns:
            [R, d, V_d]: row 0 drafts the token after the root, row j the j-th token after that.

        Raises:
            ValueError: a slot without committed tokens.
        """
        config, state = self._model.config, self._state
        lengths = state.lengths[list(slots)]
        if (lengths < 1).any():
            raise ValueError(f"slots={list(slots)}: one of them has no committed tokens yet")
        extent = int(lengths.max()) + config.draft_length
        index = torch.tensor(list(slots), device=self._device)
        end = torch.from_numpy(lengths).to(self._device)
        positions = end[:, None] - 1 + self._steps  # [R, d]
        cos, sin = state.cos[positions], state.sin[positions]
        own = state.split(state.drafts[index])
        mask_places = index[:, None], positions[:, 1:]
        self._keys[mask_places] = rotate(own.key[:, 1:], cos[:, 1:], sin[:, 1:])
        self._values[mask_places] = own.value[:, 1:]
        visible = torch.arange(extent, device=self._device) <= positions[..., None]  # [R, d, extent]
        rows = slice(slots[0], slots[0] + 1) if len(slots) == 1 else index
        query = rotate(own.query, cos, sin)
        attended = _attend(query, self._keys[rows, :extent], self._values[rows, :extent], visible)
        return self._model.lm_head(self._model.finish(own.residual, attended))

    @torch.inference_mode()
    def _candidates(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Target ids [R, d, C] int64 and their soft-maxed probabilities, fp32, best first."""
        best, index = self.logits(slots).topk(num_candidates(self._model.config), dim=-1)
        probs = torch.softmax(best.float(), dim=-1)
        return self._draft_ids[index].cpu().numpy(), probs.cpu().numpy()


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention of few queries, softmax in fp32.

    Args:
        query: [R, d, n_h, head_dim]; keys, values: [R, S, n_kv, head_dim]; visible: [R, d, S] bool.

    Returns:
        [R, d, n_h * head_dim].
    """
    num_requests, depth, num_heads, head_dim = query.shape
    num_groups = keys.shape[2]
    share = num_heads // num_groups
    query = query.view(num_requests, depth, num_groups, share, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(num_requests, num_groups, share * depth, head_dim) * head_dim**-0.5
    scores = query @ keys.permute(0, 2, 3, 1)  # [R, n_kv, share * d, S]
    hidden = ~visible[:, None, None]
    scores = scores.float().unflatten(2, (share, depth)).masked_fill(hidden, float("-inf"))
    weights = scores.softmax(dim=-1).to(values.dtype).flatten(2, 3)
    mixed = weights @ values.transpose(1, 2)  # [R, n_kv, share * d, head_dim]
    mixed = mixed.view(num_requests, num_groups, share, depth, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(num_requests, depth, num_heads * head_dim)


def build_dart(
    target: Target,
    path: str | Path | None = None,
    trie: str | Path | NgramTrie | None = "default",
    num_nodes: int = 59,
    prune: PruneConfig | None = None,
    double_norm: bool = True,
    dtype: str = "auto",
    policy: str = "full",
    rows: float = 16.0,
    search: str = "auto",
    search_threads: int = 1,
) -> DartDrafter:
    """DART: all positions drafted in one forward, pruned to a tree with the help of an n-gram trie.

    Args:
        target: the target; the network runs on its device.
        path: folder with `config.json` and `model.safetensors`; None takes the shipped one of the embedded target.
        trie: a trie or its path; "default" is `ngram.trie` in the folder of the weights, if there; None for none.
        num_nodes: nodes of a tree, the root not counted; ignored when `prune` is given.
        prune: all settings of the search; by default DART's, with the tokenizer's eos as eos.
        double_norm: see `DartModel`.
        policy, rows: see `workbench.budget.table.build_tree_policy`; "shared" divides `rows` times the requests of a
            round among their trees by score, as DScale does with chains.
        dtype: of the draft network: "float32", "bfloat16", "float16", or "auto" for the target's dtype, but bfloat16
            on a CPU with instructions for it. A draft only proposes, so this never changes the law of the output.
        search: where rounds on the device search: "device" as part of their graphs, with a copy of the trie in the
            device's memory; "host" between two graphs; "auto" on the device if that is CUDA. Trees are the same. With
            policies that share rows among trees the device's trees are cut on the host.
        search_threads: threads among which a search on the host divides the requests of a round, 1..256.

    Raises:
        ValueError: no weights are known for the target, they do not fit it, or `dtype`, `search` or `search_threads` is
            none of those allowed.
    """
    threads = SearchThreads(search_threads) if search_threads != 1 else None
    search = resolve_search(search, target.device)
    folder = weights_folder(target, path, "DART")
    if target.num_layers < 7:
        raise ValueError(f"the target has {target.num_layers} layers; DART needs 7 or more for three different taps")
    model = load_dart(folder, resolve_dtype(dtype, target), target.device, double_norm)
    config = model.config
    require_fit(
        folder,
        [
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("hidden_size", config.hidden_size, target.hidden_size),
        ],
    )
    found = resolve_trie(trie, target, folder / TRIE)
    if prune is None:
        prune = PruneConfig(num_nodes=num_nodes, eos_id=_eos_id(target))
    taps, cut = dart_taps(target.num_layers), build_tree_policy(policy, rows)
    return DartDrafter(model, target.embedding, taps, found, prune, cut, search, threads)


def dart_taps(num_layers: int) -> tuple[int, int, int]:
    """Indices of the tapped hidden states: inputs of layers 2, L // 2 and L - 3."""
    return 2, num_layers // 2, num_layers - 3


def _eos_id(target: Target) -> int | None:
    """The tokenizer's eos, as in the reference, if it ends an output; otherwise the first id that does."""
    eos = getattr(target.tokenizer, "eos_token_id", None)
    if eos in target.stop_ids:
        return eos
    return target.stop_ids[0] if target.stop_ids else None
