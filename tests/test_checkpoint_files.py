"""Draft networks in files that are hostile or beyond what can be read: each error names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dflash_setup import random_network
from safetensors.torch import load_file, save_file

from workbench.drafters.dflash_files import load_dflash, save_dflash


def written(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None) -> Path:
    save_dflash(random_network(), folder, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float8_e4m3fn, "norm.weight is torch.float8_e4m3fn, needed a float of 16, 32 or 64 bits"),
        (torch.float8_e5m2, "norm.weight is torch.float8_e5m2"),
        (torch.complex64, "norm.weight is torch.complex64"),
        (torch.bool, "norm.weight is torch.bool"),
    ],
    ids=str,
)
def test_kinds_of_numbers_without_an_infinity_to_look_for_are_refused(tmp_path, dtype, words):
    with pytest.raises(ValueError, match=words):
        load_dflash(written(tmp_path, lambda t: t.update({"norm.weight": t["norm.weight"].to(dtype)})))


def test_numbers_must_be_finite_in_the_dtype_they_are_read_as(tmp_path):
    def edit(tensors):
        tensors["fc.weight"] = tensors["fc.weight"].double()
        tensors["fc.weight"][0, 0] = 1e5

    folder = written(tmp_path, edit)
    assert load_dflash(folder).fc.weight[0, 0] == 1e5
    with pytest.raises(ValueError, match=r"NaN or infinity in fc\.weight \(read as torch\.float16\)"):
        load_dflash(folder, torch.float16)
    with pytest.raises(ValueError, match="NaN or infinity"):
        load_dflash(written(tmp_path, lambda t: t.update({"fc.weight": t["fc.weight"].double() * 1e300})))


@pytest.mark.parametrize(
    "text",
    ["[" * 500_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "{", "[]", '{"a": "\\'],
    ids=["lists", "objects", "digits", "open", "a list", "escape"],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, text):
    folder = written(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (is no JSON|holds a list)"):
        load_dflash(folder)


def test_a_folder_must_be_a_path():
    for folder in (None, 3):
        with pytest.raises(ValueError, match=f"folder={folder} has type"):
            load_dflash(folder)
