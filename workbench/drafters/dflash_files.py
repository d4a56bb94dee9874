"""Reading and writing the published files of a DFlash draft network; see `checkpoint_files.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.drafters.checkpoint_files import load_network, save_network
from workbench.drafters.dflash_config import DFlashConfig
from workbench.drafters.dflash_model import DFlashModel

#: DeepSpec's files carry copies of the target's embedding and head; the target's own are used in every case.
_IGNORED = ("embed_tokens.weight", "lm_head.weight")


def load_dflash(
    folder: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DFlashModel:
    """Reads a draft network, in z-lab's or DeepSpec's dialect.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        dtype: of the weights.
        device: where the weights go.

    Raises:
        ValueError: a file is missing or damaged, a config field is bad, the network is of another method, or tensors
            are missing, unexpected or mis-shaped (all of them are listed).
    """
    return load_network(
        folder, lambda fields, _: DFlashModel(DFlashConfig.from_dict(fields)), dtype, device, ignored=_IGNORED
    )


def save_dflash(model: DFlashModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a draft network in z-lab's dialect; each file appears whole or not at all.

    Args:
        model: the network.
        folder: made when missing; files of the same names are replaced.
        dtype: weights are stored in it.
    """
    save_network(model, model.config.to_dict(), folder, dtype)
