"""Reading and writing the published files of a DART draft network: `config.json` and `model.safetensors`.

Reading is strict: the file must hold exactly the tensors of the layout in exactly their shapes. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
#: Published files may carry the target's embedding; the target's own is used in every case.
_OPTIONAL = "embed_tokens.weight"
_MAX_CONFIG_BYTES = 1 << 20


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
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}; a draft network is {CONFIG} and {WEIGHTS}")
    fields = _read_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            head_rows = (shapes.get("lm_head.weight") or (None,))[0]
            config = DartConfig.from_dict(fields, head_rows)
            with torch.device("meta"):
                model = DartModel(config, double_norm)
            expected = model.state_dict()
            _check_tensors(folder / WEIGHTS, shapes, expected)
            tensors = {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is no readable safetensors file: {error}") from error
    _check_kinds(folder / WEIGHTS, tensors)
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        raise ValueError(f"{folder / WEIGHTS}: NaN or infinity in {', '.join(broken)}")
    model.load_state_dict(
        {n: t.to(device, dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}, assign=True
    )
    ids = model.draft_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(f"{folder / WEIGHTS}: d2t names ids outside 0..{config.vocab_size - 1} or one id twice")
    return model.requires_grad_(False).eval()


def save_dart(model: DartModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a draft network; each file appears whole or not at all.

    Args:
        model: the network.
        folder: made when missing; files of the same names are replaced.
        dtype: floating-point weights are stored in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    fields = model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    partial = folder / f".{WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / f".{CONFIG}.partial"
    partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG)


def _read_config(path: Path) -> dict:
    size = path.stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has {size} bytes; allowed: up to {_MAX_CONFIG_BYTES}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}; needed: an object")
    return fields


def _check_tensors(path: Path, found: dict[str, tuple[int, ...]], expected: dict[str, torch.Tensor]) -> None:
    problems = [f"missing {name} {list(t.shape)}" for name, t in expected.items() if name not in found]
    problems += [f"unexpected {name} {list(found[name])}" for name in found if name not in expected | {_OPTIONAL: 0}]
    problems += [
        f"{name} is {list(found[name])}, needed {list(t.shape)}"
        for name, t in expected.items()
        if name in found and found[name] != tuple(t.shape)
    ]
    if problems:
        raise ValueError(f"{path} does not fit its config: " + "; ".join(problems))


def _check_kinds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    needed = {"d2t": torch.int64, "t2d": torch.bool}
    wrong = [f"{n} is {tensors[n].dtype}, needed {kind}" for n, kind in needed.items() if tensors[n].dtype != kind]
    wrong += [
        f"{n} is {t.dtype}, needed a float" for n, t in tensors.items() if n not in needed and not t.is_floating_point()
    ]
    if wrong:
        raise ValueError(f"{path}: " + "; ".join(wrong))
