"""Reading and writing draft networks in published layouts: a folder with `config.json` and `model.safetensors`.

Reading is strict: the file must hold exactly the tensors of the layout in exactly their shapes. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Network = TypeVar("Network", bound=nn.Module)
Shapes = dict[str, tuple[int, ...]]


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """The path that option `name` holds.

    Raises:
        ValueError: no text and no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name}={value!r} has type {type(value).__name__}; allowed: the path of a file or folder")
    return Path(value)


def load_network(
    folder: str | Path,
    build: Callable[[dict[str, Any], Shapes], Network],
    dtype: torch.dtype,
    device: torch.device | str,
    ignored: Collection[str] = (),
    kinds: Mapping[str, torch.dtype] | None = None,
) -> Network:
    """Reads a draft network.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        build: makes the network from the fields of the config and the shapes found in the file; called under the meta
            device, so it costs no memory. Raises ValueError for a bad field.
        dtype: of the floating-point weights.
        device: where the weights go.
        ignored: tensors that a file may hold besides those of the network; they are not read.
        kinds: tensors that are no floats, with the dtype that each must have and keeps.

    Returns:
        The network in eval mode without gradients.

    Raises:
        ValueError: a file is missing or damaged, a config field is bad, or tensors are missing, unexpected, mis-shaped
            or of a wrong dtype (all of them are listed), or hold NaN or infinity, in the file or once in `dtype`.
    """
    folder = as_path("folder", folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; a draft network is {CONFIG} and {WEIGHTS}")
    fields = _read_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            network = _built(folder / CONFIG, build, fields, shapes)
            expected = network.state_dict()
            _check_shapes(folder / WEIGHTS, shapes, expected, ignored)
            tensors = {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is no readable safetensors file: {error}") from error
    _check_kinds(folder / WEIGHTS, tensors, kinds or {})
    # A number that is finite in the file may not be in a smaller dtype, so they are looked at only now.
    moved = {n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    _check_finite(folder / WEIGHTS, moved, dtype)
    network.load_state_dict(moved, assign=True)
    return network.requires_grad_(False).eval()


def save_network(network: nn.Module, fields: dict[str, Any], folder: str | Path, dtype: torch.dtype) -> None:
    """Writes a draft network; each file appears whole or not at all.

    Args:
        network: its `state_dict` is stored.
        fields: content of `config.json`; `dtype` is added.
        folder: made when missing; files of the same names are replaced.
        dtype: floating-point weights are stored in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in network.state_dict().items()
    }
    fields = fields | {"dtype": str(dtype).removeprefix("torch.")}
    partial = folder / f".{WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / f".{CONFIG}.partial"
    partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG)


def _read_config(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has {size} bytes; allowed: up to {_MAX_CONFIG_BYTES}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}; needed: an object")
    return fields


def _built(path: Path, build: Callable[[dict[str, Any], Shapes], Network], fields: dict, shapes: Shapes) -> Network:
    try:
        with torch.device("meta"):
            return build(fields, shapes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_shapes(path: Path, found: Shapes, expected: dict[str, torch.Tensor], ignored: Collection[str]) -> None:
    problems = [f"missing {name} {list(t.shape)}" for name, t in expected.items() if name not in found]
    problems += [
        f"unexpected {name} {list(found[name])}" for name in found if name not in expected and name not in ignored
    ]
    problems += [
        f"{name} is {list(found[name])}, needed {list(t.shape)}"
        for name, t in expected.items()
        if name in found and found[name] != tuple(t.shape)
    ]
    if problems:
        raise ValueError(f"{path} does not fit its config: " + "; ".join(problems))


def _check_kinds(path: Path, tensors: dict[str, torch.Tensor], kinds: Mapping[str, torch.dtype]) -> None:
    wrong = [f"{n} is {tensors[n].dtype}, needed {kind}" for n, kind in kinds.items() if tensors[n].dtype != kind]
    wrong += [
        f"{n} is {t.dtype}, needed a float of 16, 32 or 64 bits"
        for n, t in tensors.items()
        if n not in kinds and t.dtype not in _FLOATS
    ]
    if wrong:
        raise ValueError(f"{path}: " + "; ".join(wrong))


def _check_finite(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        raise ValueError(f"{path}: NaN or infinity in {', '.join(broken)} (read as {dtype})")
