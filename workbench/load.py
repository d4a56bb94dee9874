"""Targets and drafting methods by name: the two calls every notebook begins with."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from workbench.drafters.table import DRAFTERS
from workbench.models.embedded import embedded_folder
from workbench.models.target import Target
from workbench.types import Drafter

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_target(
    name_or_path: str | Path,
    dtype: str = "float32",
    device: str = "cpu",
    context_limit: int | None = None,
    attention: str = "auto",
    forward: str = "auto",
) -> Target:
    """Loads a causal LM as a target. Only safetensors weights are read, and no code of the checkpoint is run.

    Args:
        name_or_path: "embedded" (a small model that needs no hub), a folder, or the id of a model on the hub.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda" or "cuda:N".
        context_limit: most tokens of a request, prompt included; default: what the model was made for.
        attention: "plain" for plain torch, "tile" for the Triton kernels ("tile:rows128" and others choose the tile);
            "auto" takes the kernels on a CUDA device.
        forward: "stock" for the model's own operations, "fused" or "compiled"; see `workbench.models.target.Target`.

    Raises:
        ValueError: an argument out of range, or a folder that holds no complete model.
        OSError: no model of that id could be had from the hub or its cache.
        RuntimeError: the embedded target could not be downloaded.
    """
    torch_dtype = _checked_dtype(dtype)
    place = _checked_device(device)
    name = str(name_or_path)
    folder = embedded_folder() if name == EMBEDDED else _local_folder(name)
    if folder is None:
        model, tokenizer = _from_hub(name, torch_dtype, place)
    else:
        model, tokenizer = _from_folder(folder, torch_dtype, place)
        name = EMBEDDED if name == EMBEDDED else folder.name
    return Target(model, tokenizer, name=name, context_limit=context_limit, attention=attention, forward=forward)


def load_method(name: str, target: Target, path: str | Path | None = None, **options: object) -> Drafter:
    """Builds a drafting method for a target.

    Args:
        name: key of `workbench.drafters.table.DRAFTERS`.
        target: the target it drafts for.
        path: folder (or trie file) of its weights; default: those shipped for the embedded target.
        options: settings of the method.

    Raises:
        ValueError: an unknown method, or an option that the method does not have.
    """
    if name not in DRAFTERS:
        raise ValueError(f"method={name!r} is unknown{_close(name, DRAFTERS)}; one of {', '.join(DRAFTERS)}")
    builder = DRAFTERS[name]
    _check_options(name, builder, options)
    return builder(target, path=path, **options)


def _check_options(name: str, builder: Callable[..., Drafter], options: dict[str, object]) -> None:
    parameters = inspect.signature(builder).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = [p.name for p in parameters if p.name not in ("target", "path")]
    for option in options:
        if option not in allowed:
            listed = ", ".join(allowed) or "none"
            raise ValueError(f"{option}={options[option]!r}: method {name!r} has no such option; it has: {listed}")


def _close(name: str, names: object) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _checked_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _checked_device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'") from error
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")
    count = torch.cuda.device_count() if place.type == "cuda" else 1
    if (place.index or 0) >= count:
        raise ValueError(f"device={device!r}: this machine has {count} CUDA devices")
    return place


def _local_folder(name: str) -> Path | None:
    """The folder that `name` means, or None when it is a hub id.

    Raises:
        ValueError: the name can only be a path and is none, or the folder is not a safetensors model.
    """
    if not name.strip():
        raise ValueError("name_or_path is empty; give 'embedded', a model folder or a hub id")
    if "/" not in name and difflib.get_close_matches(name, [EMBEDDED], cutoff=0.8):
        raise ValueError(f"name_or_path={name!r} is unknown; did you mean {EMBEDDED!r}?")
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists():
            raise ValueError(f"name_or_path={name!r} is a file; give the folder that holds it")
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
            raise ValueError(f"name_or_path={name!r}: there is no such folder")
        return None
    if not (path / "config.json").is_file():
        raise ValueError(f"name_or_path={name!r}: the folder has no config.json, so it is no transformers model")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"name_or_path={name!r}: the folder has no *.safetensors; other weight formats are not read")
    return path.resolve()


def _from_folder(
    folder: Path, dtype: torch.dtype, place: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    try:
        model = _load_model(str(folder), dtype, place)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: the model cannot be read: {error}") from error
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        logger.warning("%s has no tokenizer; prompts must be token ids", folder)
        return model, None
    return model, AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def _from_hub(
    name: str, dtype: torch.dtype, place: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    try:
        return _load_model(name, dtype, place), AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise OSError(
            f"target {name!r} is no local folder, and the hub gave no such model. Without a "
            f"hub, pass the folder of a downloaded copy, or 'embedded'. The loader said: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _load_model(source: str, dtype: torch.dtype, place: torch.device) -> PreTrainedModel:
    # accelerate puts weights straight onto the GPU; without it they pass through host memory.
    direct = place.type == "cuda" and importlib.util.find_spec("accelerate") is not None
    model, report = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        device_map={"": place} if direct else None,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{source}: {len(missing)} weights are missing, the first is {missing[0]}")
    cut = sorted(key for key in report["unexpected_keys"] if re.search(r"\.layers\.\d+\.", key))
    if cut:
        raise ValueError(
            f"{source}: {len(cut)} weights have no place in the model, the first is {cut[0]}; does num_hidden_layers="
            f"{model.config.num_hidden_layers} in config.json fit the file?"
        )
    return model if direct else model.to(place)
