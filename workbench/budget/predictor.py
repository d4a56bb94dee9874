"""DScale's acceptance predictor (arXiv 2609.37532): 1735 features -> 64 -> 15 probabilities, 112,079 parameters.

Output j is the logit of "full-width verification accepts at least j drafted tokens". What becomes a score is the
running minimum of the probabilities, not their product: each output already speaks of the whole prefix.

A file is one safetensors file with the seeds of the features in its header. Reading is strict: exactly the tensors of
the network, in their shapes, float32, finite. Nothing is unpickled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from workbench.batch import Chains
from workbench.budget.confidence import Confidence
from workbench.budget.features import DraftFeatures, feature_size
from workbench.types import MAX_TREE_ROWS, Signals

NUM_HIDDEN = 64
_FORMAT = "acceptance-predictor-1"
#: A predictor of 64 rows has less than 2 MB.
_MAX_BYTES = 1 << 24
_RANGES = {
    "hidden_size": (1, 1 << 17),
    "vocab_size": (16, 1 << 24),
    "width": (2, MAX_TREE_ROWS),
    "hidden_seed": (0, 2**32 - 1),
    "logit_seed": (0, 2**32 - 1),
}


class AcceptancePredictor(nn.Module):
    """Two linear layers with a ReLU between them.

    Args:
        width: rows of a draft, anchor included; it gives width - 1 outputs.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            nn.Linear(feature_size(width), NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, width - 1)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits: [R, feature_size] float32 -> [R, width - 1]."""
        return self.layers(features)

    def probabilities(self, features: torch.Tensor) -> torch.Tensor:
        """[R, width - 1]: probability that at least 1, 2, ... drafted tokens are accepted, not yet made to fall."""
        return self(features).sigmoid()


def running_minimum(probabilities: torch.Tensor) -> torch.Tensor:
    """Scores that never rise along the last axis."""
    return probabilities.cummin(-1).values


@torch.no_grad()
def fold_standardisation(
    model: AcceptancePredictor, mean: torch.Tensor, deviation: torch.Tensor
) -> AcceptancePredictor:
    """A predictor of raw features from one of standardised features, (x - mean) / deviation.

    Args:
        model: trained on standardised features; left as it is.
        mean, deviation: [feature_size] of the training set; a feature that never varies needs a deviation like 1.

    Raises:
        ValueError: another shape, values that are not finite, or a deviation that is not positive.
    """
    size = model.layers[0].in_features
    if mean.shape != (size,) or deviation.shape != (size,):
        raise ValueError(f"mean {list(mean.shape)}, deviation {list(deviation.shape)}, allowed [{size}]")
    if not bool((mean.isfinite() & deviation.isfinite() & (deviation > 0)).all()):
        raise ValueError("mean and deviation hold values out of range, allowed: finite, deviation above 0")
    folded = AcceptancePredictor(model.width).to(model.layers[0].weight.device)
    folded.load_state_dict(model.state_dict())
    first = folded.layers[0]
    weight = first.weight.double() / deviation.to(first.weight.device, torch.float64)
    first.bias.copy_(first.bias.double() - weight @ mean.to(first.weight.device, torch.float64))
    first.weight.copy_(weight)
    return folded.requires_grad_(False).eval()


class PredictorScorer:
    """A `workbench.types.Scorer`: features, network, running minimum.

    Args:
        predictor: of raw features.
        features: on the same device, for drafts of the same width.

    Raises:
        ValueError: their widths differ.
    """

    def __init__(self, predictor: AcceptancePredictor, features: DraftFeatures) -> None:
        if predictor.width != features.width:
            raise ValueError(f"the predictor is for {predictor.width} rows, the features for {features.width}")
        self.predictor, self.features = predictor, features

    @torch.no_grad()
    def __call__(self, signals: Signals) -> np.ndarray:
        """See `workbench.types.Scorer`."""
        return self._scores(self.features(signals)).cpu().numpy()

    @torch.no_grad()
    def scores(self, chains: Chains, confidence: Confidence, num_live: torch.Tensor) -> torch.Tensor:
        """The same as a tensor on the device; nothing is read on the host.

        Args:
            chains: drafts of R requests, of width - 1 tokens each.
            confidence: of their logits.
            num_live: integer of one element, requests that draft.

        Returns:
            [R, width - 1] float32. A row with NaN in its draft is NaN, the others do not notice.

        Raises:
            ValueError: the drafts have another length, hidden size or vocabulary.
        """
        self.features.check_drafts(len(chains.tokens), chains.hidden, chains.logits)
        _, best, normaliser, entropy = confidence
        return self._scores(self.features.vectors(chains.hidden, best, normaliser, entropy, num_live))

    def _scores(self, features: torch.Tensor) -> torch.Tensor:
        return running_minimum(self.predictor.probabilities(features))


@dataclass(frozen=True)
class PredictorInfo:
    """What must be known to compute the features a predictor was trained on.

    Attributes:
        hidden_size, vocab_size: of the drafter's output head.
        width: rows of a draft, anchor included, 2..64.
        hidden_seed, logit_seed: see `DraftFeatures`.
        notes: anything else that is worth keeping, such as the pair of models; text to text.
    """

    hidden_size: int
    vocab_size: int
    width: int = 16
    hidden_seed: int = 0
    logit_seed: int = 1
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed {low}..{high}")
        taken = self.notes.keys() & {"format", *_RANGES}
        texts = all(isinstance(text, str) for pair in self.notes.items() for text in pair)
        if taken or not texts:
            raise ValueError(f"notes {self.notes}, allowed: text to text, without {', '.join(('format', *_RANGES))}")

    @classmethod
    def of(cls, features: DraftFeatures, notes: dict[str, str] | None = None) -> PredictorInfo:
        """That of a predictor trained on these features."""
        return cls(**{name: getattr(features, name) for name in _RANGES}, notes=notes or {})

    def features(self, head_weight: torch.Tensor) -> DraftFeatures:
        """The features for the head they belong to.

        Args:
            head_weight: [vocab_size, hidden_size].

        Raises:
            ValueError: the head has another shape.
        """
        if tuple(head_weight.shape) != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"the predictor belongs to an output head [{self.vocab_size}, {self.hidden_size}], "
                f"this one is {list(head_weight.shape)}"
            )
        return DraftFeatures(self.hidden_size, head_weight, self.width, self.hidden_seed, self.logit_seed)


def save_predictor(model: AcceptancePredictor, path: str | Path, info: PredictorInfo) -> None:
    """Writes a predictor of raw features (see `fold_standardisation`); the file appears whole or not at all.

    Raises:
        ValueError: the widths of `model` and `info` differ, or a weight is not finite.
    """
    path = Path(path)
    if model.width != info.width:
        raise ValueError(f"width of the predictor is {model.width}, of its info {info.width}")
    tensors = {name: t.detach().to("cpu", torch.float32).contiguous() for name, t in model.state_dict().items()}
    _check_finite(path, tensors)
    header = {"format": _FORMAT, **{name: str(getattr(info, name)) for name in _RANGES}, **info.notes}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata=header)
    os.replace(partial, path)


def load_predictor(path: str | Path, device: torch.device | str = "cpu") -> tuple[AcceptancePredictor, PredictorInfo]:
    """Reads a predictor.

    Raises:
        ValueError: the file is missing, damaged, too large or of another kind; header fields are missing or out of
            range; tensors are missing, unexpected, mis-shaped, not float32 or not finite (all of them are listed).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, allowed up to {_MAX_BYTES}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            info = _read_info(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from error
    with torch.device("meta"):
        model = AcceptancePredictor(info.width)
    _check_tensors(path, tensors, model.state_dict())
    _check_finite(path, tensors)
    model.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    return model.requires_grad_(False).eval(), info


def load_scorer(path: str | Path, head_weight: torch.Tensor) -> PredictorScorer:
    """The scorer of a saved predictor for the drafter with this output head [V, H], on its device.

    Raises:
        ValueError: see `load_predictor` and `PredictorInfo.features`.
    """
    predictor, info = load_predictor(path, head_weight.device)
    return PredictorScorer(predictor, info.features(head_weight))


def _read_info(path: Path, header: dict[str, str]) -> PredictorInfo:
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {header.get('format')!r}, needed {_FORMAT!r}")
    missing = [name for name in _RANGES if name not in header]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)} in its header")
    numbers = {}
    for name in _RANGES:
        # isdecimal takes digits of other scripts too; the length keeps int() from long work.
        if not (header[name].isascii() and header[name].isdecimal() and len(header[name]) <= 10):
            raise ValueError(f"{path}: {name} is {header[name][:20]!r}, allowed: a number")
        numbers[name] = int(header[name])
    notes = {name: text for name, text in header.items() if name != "format" and name not in _RANGES}
    try:
        return PredictorInfo(**numbers, notes=notes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_tensors(path: Path, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    problems = [f"missing {name} {list(t.shape)}" for name, t in expected.items() if name not in found]
    problems += [f"unexpected {name} {list(t.shape)}" for name, t in found.items() if name not in expected]
    problems += [
        f"{name} is {found[name].dtype} {list(found[name].shape)}, needed float32 {list(t.shape)}"
        for name, t in expected.items()
        if name in found and (found[name].shape != t.shape or found[name].dtype != torch.float32)
    ]
    if problems:
        raise ValueError(f"{path} holds no predictor of its width: " + "; ".join(problems))


def _check_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise ValueError(f"{path}: NaN or infinity in {', '.join(broken)}")
