"""Reading and writing the published files of a DART draft network; see `checkpoint_files.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.drafters.checkpoint_files import WEIGHTS, Shapes, load_network, save_network
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel

#: Published files may carry the target's embedding; the target's own is used in every case.
_IGNORED = ("embed_tokens.weight",)
_KINDS = {"d2t": torch.int64, "t2d": torch.bool}


def load_dart(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    double_norm: bool = True,
) -> DartModel:
    """Reads a draft network.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        dtype: of the floating-point weights; `d2t` stays int64 and `t2d` bool.
        device: where the weights go.
        double_norm: see `DartModel`.

    Raises:
        ValueError: a file is missing or damaged, a config field is bad, tensors are missing, unexpected or mis-shaped
            (all of them are listed), or draft ids point outside the vocabulary.
    """

    def build(fields: dict[str, Any], shapes: Shapes) -> DartModel:
        head_rows = (shapes.get("lm_head.weight") or (None,))[0]
        return DartModel(DartConfig.from_dict(fields, head_rows), double_norm)

    model = load_network(folder, build, dtype, device, _IGNORED, _KINDS)
    ids, vocab_size = model.draft_ids, model.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(f"{Path(folder) / WEIGHTS}: d2t names ids outside 0..{vocab_size - 1} or one id twice")
    return model


def save_dart(model: DartModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a draft network; each file appears whole or not at all.

    Args:
        model: the network.
        folder: made when missing; files of the same names are replaced.
        dtype: floating-point weights are stored in it.
    """
    save_network(model, model.config.to_dict(), folder, dtype)
