"""DART's draft trees (arXiv 2601.19278) with every extension scored and sorted: the truth for `kernels.prune`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from kernels.ref.ngrams import DeviceTrie, Grams, check_trie
from kernels.tensor_checks import require_device, require_int64, require_tensors

#: Nodes of a tree without its root: ancestor bits fill an int64.
MAX_NODES = 63
MAX_BEAM_WIDTH = 1024
#: Candidates of all levels of one request.
MAX_CANDIDATES = 4096


class DraftTrees(NamedTuple):
    """Where the trees go: contiguous, N + 1 rows each, the root first, then nodes by falling score.

    Rows from `sizes[r]` on mean nothing.

    Attributes:
        tokens, depths: [R, N+1] int64, the root has depth 0.
        parents: [R, N+1] int64, row of the parent, -1 for the root.
        scores: [R, N+1] float32, 0 for the root.
        ancestors: [R, N+1] int64 of 64 bits, bit j for row j: the root, the other ancestors and the row itself.
        sizes: [R] int64, rows of each tree.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ancestors: torch.Tensor
    sizes: torch.Tensor


class PruneSettings(NamedTuple):
    """Tunables of the search.

    Attributes:
        beam_width: paths extended at each level, 1..1024.
        num_nodes: nodes kept, the root not counted, 1..63.
        ngram_weight: weight of the n-gram term, 0 or more.
        level_exponent: W_l = (l + 1)^-level_exponent, 0 or more.
        logit_decay: G_l = logit_decay^l, above 0 and at most 1.
        epsilon: added to probabilities inside the logarithm, above 0 and below 1.
        eos_id: token after which a path is extended only if the beam has room left, -1 for none.
    """

    beam_width: int
    num_nodes: int
    ngram_weight: float
    level_exponent: float
    logit_decay: float
    epsilon: float
    eos_id: int


class _Node(NamedTuple):
    parent: int
    path: tuple[int, ...]
    score: float


def check_prune(
    ids: torch.Tensor,
    probs: torch.Tensor,
    tails: torch.Tensor,
    levels: torch.Tensor,
    limits: torch.Tensor,
    trie: DeviceTrie | None,
    settings: PruneSettings,
    out: DraftTrees,
) -> None:
    """Refuses what no implementation takes; looks at no value on the device.

    Raises:
        ValueError: another shape or type than `prune` documents, or a setting out of range.
    """
    _check_settings(settings)
    if ids.ndim != 3 or 0 in ids.shape[1:] or ids.shape[1] * ids.shape[2] > MAX_CANDIDATES:
        raise ValueError(f"ids is {list(ids.shape)}, allowed [R, K, C] with K * C in 1..{MAX_CANDIDATES}")
    num_requests = len(ids)
    if tails.ndim != 2 or tails.shape[1] == 0:
        raise ValueError(f"tails is {list(tails.shape)}, allowed [{num_requests}, 1 or more]")
    rows = (num_requests, settings.num_nodes + 1)
    fields = out._asdict()
    require_tensors(ids=(ids, torch.int64, ids.shape), probs=(probs, torch.float32, ids.shape))
    require_tensors(tails=(tails, torch.int64, (num_requests, tails.shape[1])))
    require_int64(num_requests, levels=levels, limits=limits, sizes=fields.pop("sizes"))
    require_tensors(**{
        name: (field, torch.float32 if name == "scores" else torch.int64, rows) for name, field in fields.items()
    })  # fmt: skip
    require_device(ids.device, probs=probs, tails=tails, levels=levels, limits=limits, **out._asdict())
    if trie is not None:
        check_trie(trie)
        require_device(ids.device, **dict(zip(DeviceTrie._fields[:6], trie[:6], strict=True)))


def _check_settings(settings: PruneSettings) -> None:
    ranges = {
        "beam_width": (1 <= settings.beam_width <= MAX_BEAM_WIDTH, f"1..{MAX_BEAM_WIDTH}"),
        "num_nodes": (1 <= settings.num_nodes <= MAX_NODES, f"1..{MAX_NODES}"),
        "ngram_weight": (0 <= settings.ngram_weight < math.inf, "0 or more, finite"),
        "level_exponent": (0 <= settings.level_exponent < math.inf, "0 or more, finite"),
        "logit_decay": (0 < settings.logit_decay <= 1, "0..1 (0 excluded)"),
        "epsilon": (0 < settings.epsilon < 1, "0..1 (both excluded)"),
        "eos_id": (-1 <= settings.eos_id < 2**31, "-1..2147483647"),
    }
    for name, (good, allowed) in ranges.items():
        if not good:
            raise ValueError(f"{name} is {getattr(settings, name)}, allowed {allowed}")


def prune(
    ids: torch.Tensor,
    probs: torch.Tensor,
    tails: torch.Tensor,
    levels: torch.Tensor,
    limits: torch.Tensor,
    trie: DeviceTrie | None,
    settings: PruneSettings,
    out: DraftTrees,
) -> None:
    """From candidates per level to one draft tree for each request, the best-scoring paths of a beam search.

        score(path + t) = score(path) + W_l * (G_l * ln(p_l(t) + epsilon) + weight * ln(P(t | context, path) + epsilon))

    The `beam_width` best paths are extended from level to level, those that end in eos after all others; the best of
    all extensions are the tree. The better score goes first, then the shallower node, then the earlier one; scores are
    float64 inside, and no term is above 0, so a parent goes before its children. There is no n-gram term at level 0.
    P backs off, for each token, to the longest suffix of the context that the token was seen after, and is 0 if there
    is none.

    Args:
        ids: [R, K, C] int64 candidates of each level, 0..2^31-1.
        probs: [R, K, C] float32, their probabilities; NaN counts as 0.
        tails: [R, G] int64, the last tokens of each context, right aligned, the root last; -1 where there is none.
        levels: [R] int64, levels that a request may use, 0..K.
        limits: [R] int64, most rows of each tree, root included; 0 for a request that is not there.
        trie: n-gram counts on the same device, None for no n-gram term.
        settings: tunables.
        out: written in place. sizes[r] is the least of limits[r], num_nodes + 1 and the nodes found, root included.

    Raises:
        ValueError: see `check_prune`.
    """
    check_prune(ids, probs, tails, levels, limits, trie, settings, out)
    grams = Grams(trie) if trie is not None and settings.ngram_weight > 0 else None
    for r, (limit, depth) in enumerate(zip(limits.tolist(), levels.tolist(), strict=True)):
        if limit <= 0:
            out.sizes[r] = 0
            continue
        used, tail = max(depth, 0), tails[r].tolist()
        nodes = _extensions(ids[r, :used].tolist(), probs[r, :used].tolist(), tail, grams, settings)
        kept = sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[: min(settings.num_nodes, limit - 1)]
        _write(nodes, kept, tail[-1], r, out)


def _extensions(
    ids: list[list[int]],
    probs: list[list[float]],
    context: list[int],
    grams: Grams | None,
    settings: PruneSettings,
) -> list[_Node]:
    """All extensions of all beams: level by level, path by path, candidate by candidate."""
    nodes: list[_Node] = []
    beam = [-1]
    for level, (tokens, chances) in enumerate(zip(ids, probs, strict=True)):
        level_weight = (level + 1.0) ** -settings.level_exponent
        draft_weight = level_weight * settings.logit_decay**level
        first = len(nodes)
        for parent in beam:
            path, base = (nodes[parent].path, nodes[parent].score) if parent >= 0 else ((), 0.0)
            for token, chance in zip(tokens, chances, strict=True):
                drafted = _term(draft_weight, chance, settings.epsilon)
                gram = 0.0
                if level > 0 and grams is not None:
                    seen = grams.probability([*context, *path], token)
                    gram = _term(level_weight * settings.ngram_weight, seen, settings.epsilon)
                nodes.append(_Node(parent, (*path, token), base + (drafted + gram)))
        new = range(first, len(nodes))
        beam = sorted(new, key=lambda i: (nodes[i].path[-1] == settings.eos_id, -nodes[i].score))
        beam = beam[: settings.beam_width]
    return nodes


def _term(weight: float, chance: float, epsilon: float) -> float:
    chance = min(chance, 1.0) if chance > 0 else 0.0  # NaN is not above 0
    return min(0.0, weight * math.log(chance + epsilon))


def _write(nodes: list[_Node], kept: list[int], root: int, request: int, out: DraftTrees) -> None:
    row_of = {-1: 0, **{node: row for row, node in enumerate(kept, 1)}}
    seen = [1]  # ancestor bits as unsigned numbers
    rows = [(root, -1, 0, 0.0)]
    for row, node in enumerate(kept, 1):
        parent = row_of[nodes[node].parent]
        seen.append(seen[parent] | 1 << row)
        rows.append((nodes[node].path[-1], parent, len(nodes[node].path), nodes[node].score))
    columns = [*zip(*rows, strict=True), np.array(seen, np.uint64).view(np.int64)]
    for field, column in zip(out[:5], columns, strict=True):
        field[request, : len(rows)] = torch.tensor(column, dtype=field.dtype, device=field.device)
    out.sizes[request] = len(rows)
