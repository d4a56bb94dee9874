"""Input vector of DScale's acceptance predictor (arXiv 2609.37532): one a request, 1735 numbers for 16 rows.

In this order, n = width - 1 drafted positions one after another inside a group:

    confidence   n x 18   top logit; its distance to ranks 2..16; log-probability of the top token; entropy in nats
    hidden       n x 64   hidden state of the position through a fixed random matrix
    logits       n x 32   vocabulary logits less their mean, through a fixed random matrix
    batch        25       entry 1 (from 1) the number of live requests, entry 4 one, all others zero

Since logits = E h, the third group equals h (E^T C R) with C the centring over the vocabulary: a hidden x 32 matrix
folded once, so that it costs no pass over the vocabulary. It is exact up to rounding, and does not see the rounding of
half-precision logits. The random matrices are Gaussian over the root of their inputs; numpy has promised never to
change the stream they come from, so two seeds stand for them.
"""

from __future__ import annotations

import numpy as np
import torch

from workbench.budget.confidence import normaliser_and_entropy, top_logits
from workbench.types import MAX_TREE_ROWS, Signals

NUM_RANKS = 16
HIDDEN_SIZE = 64
LOGIT_SIZE = 32
BATCH_SIZE = 25
#: Rows of the output head taken at once while folding.
_FOLD_ROWS = 8192


def feature_size(width: int) -> int:
    """Length of the vector for drafts of `width` rows, anchor included."""
    return (width - 1) * (NUM_RANKS + 2 + HIDDEN_SIZE + LOGIT_SIZE) + BATCH_SIZE


def gaussian_matrix(seed: int, num_inputs: int, num_outputs: int) -> np.ndarray:
    """Fixed random matrix [num_inputs, num_outputs] float32 of variance 1 / num_inputs, the same everywhere."""
    draws = np.random.RandomState(seed).standard_normal((num_inputs, num_outputs))
    return (draws / np.sqrt(num_inputs)).astype(np.float32)


class DraftFeatures:
    """Computes the vectors in float32, on the device of the drafts.

    Args:
        hidden_size: H of the drafter.
        head_weight: [V, H] output head of the drafter, without bias.
        width: rows of a draft, anchor included, 2..64.
        hidden_seed, logit_seed: of the two random matrices, 0..2^32-1.

    Attributes:
        size: length of a vector.

    Raises:
        ValueError: the head has another size or fewer than 16 tokens; width or a seed is out of range.
    """

    def __init__(
        self, hidden_size: int, head_weight: torch.Tensor, width: int = 16, hidden_seed: int = 0, logit_seed: int = 1
    ) -> None:
        if head_weight.ndim != 2 or head_weight.shape[1] != hidden_size or len(head_weight) < NUM_RANKS:
            raise ValueError(f"head_weight {list(head_weight.shape)}, allowed [V, {hidden_size}] with V >= {NUM_RANKS}")
        if not 2 <= width <= MAX_TREE_ROWS:
            raise ValueError(f"width is {width}, allowed 2..{MAX_TREE_ROWS}")
        for name, seed in (("hidden_seed", hidden_seed), ("logit_seed", logit_seed)):
            if not 0 <= seed < 2**32:
                raise ValueError(f"{name} is {seed}, allowed 0..{2**32 - 1}")
        self.width, self.hidden_size, self.vocab_size = width, hidden_size, len(head_weight)
        self.hidden_seed, self.logit_seed = hidden_seed, logit_seed
        self.size = feature_size(width)
        hidden_matrix = torch.from_numpy(gaussian_matrix(hidden_seed, hidden_size, HIDDEN_SIZE))
        #: [H, 64 + 32], both projections side by side.
        self.matrix = torch.cat((hidden_matrix.to(head_weight.device), _fold_head(head_weight, logit_seed)), 1)

    @torch.no_grad()
    def __call__(self, signals: Signals, num_live: int | None = None) -> torch.Tensor:
        """[R, size] float32.

        Args:
            signals: drafts of width - 1 tokens each; hidden states and logits of any float type.
            num_live: requests decided together, default those of `signals`.

        Raises:
            ValueError: the drafts have another length, hidden size or vocabulary.
        """
        num_requests = len(signals.requests)
        self.check_drafts(num_requests, signals.hidden, signals.logits)
        best = top_logits(signals.logits, NUM_RANKS)
        normaliser, entropy = normaliser_and_entropy(signals.logits)
        return self.vectors(signals.hidden, best, normaliser, entropy, num_requests if num_live is None else num_live)

    def check_drafts(self, num_requests: int, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Raises ValueError unless these are `num_requests` drafts of width - 1 tokens; looks at no value."""
        drafts = (num_requests, self.width - 1)
        if hidden.shape != (*drafts, self.hidden_size) or logits.shape != (*drafts, self.vocab_size):
            raise ValueError(
                f"hidden {list(hidden.shape)} and logits {list(logits.shape)}, allowed "
                f"[{num_requests}, {self.width - 1}, {self.hidden_size}] and [..., {self.vocab_size}]"
            )

    @torch.no_grad()
    def vectors(
        self,
        hidden: torch.Tensor,
        best: torch.Tensor,
        normaliser: torch.Tensor,
        entropy: torch.Tensor,
        num_live: int | torch.Tensor,
    ) -> torch.Tensor:
        """The vectors from what one pass over the logits has found; nothing is read on the host.

        Args:
            hidden: [R, n, H] of any float type.
            best: [R, n, 16] float32, the largest logits, largest first.
            normaliser, entropy: [R, n] float32.
            num_live: requests decided together, a number or an integer tensor of one element on the same device.

        Returns:
            [R, size] float32. A row follows from the drafts of its request and `num_live` alone.
        """
        top = best[..., :1]
        confidence = torch.cat((top, top - best[..., 1:], top - normaliser[..., None], entropy[..., None]), -1)
        projected = hidden.to(self.matrix.device, torch.float32) @ self.matrix
        batch = projected.new_zeros(len(hidden), BATCH_SIZE)
        batch[:, 0] = num_live
        batch[:, 3] = 1.0
        groups = (confidence, projected[..., :HIDDEN_SIZE], projected[..., HIDDEN_SIZE:])
        return torch.cat((*(group.flatten(1) for group in groups), batch), 1)


def _fold_head(head_weight: torch.Tensor, seed: int) -> torch.Tensor:
    """E^T C R [H, 32] float32; centring the columns of R does what centring the logits would."""
    matrix = gaussian_matrix(seed, len(head_weight), LOGIT_SIZE)
    centred = torch.from_numpy(matrix - matrix.mean(0, dtype=np.float64).astype(np.float32)).to(head_weight.device)
    folded = torch.zeros(head_weight.shape[1], LOGIT_SIZE, dtype=torch.float64, device=head_weight.device)
    for start in range(0, len(head_weight), _FOLD_ROWS):
        rows = slice(start, start + _FOLD_ROWS)
        folded += (head_weight[rows].detach().float().T @ centred[rows]).double()
    return folded.float()
