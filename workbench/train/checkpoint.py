"""State of a training run in one safetensors file: tensors, and everything else as JSON in its header.

Nothing is pickled, and the file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

_STATE = "state"


def write_checkpoint(path: str | Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Writes a checkpoint, replacing an older one of that name.

    Args:
        path: the file; its folder is made when missing.
        tensors: by name.
        state: plain JSON values.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    # Copies, since two names may share memory and a file must not.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, partial, metadata={_STATE: json.dumps(state)})
    os.replace(partial, path)


def read_checkpoint(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, state) of a checkpoint.

    Raises:
        ValueError: the file is missing, damaged or no checkpoint.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = json.loads((file.metadata() or {})[_STATE])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no readable checkpoint: {error!r}") from error
