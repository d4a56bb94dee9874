"""Options of DScale that are of the wrong kind: each is named, with what is allowed."""

from __future__ import annotations

import pytest
from drafter_zoo import make_drafter

from workbench.drafters.dscale import build_dscale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": None}, r"policy is None, allowed full, uniform"),
        ({"policy": 3}, r"policy is 3, allowed full, uniform"),
        ({"policy": ["full"]}, r"policy is \['full'\], allowed full, uniform"),
        ({"path": 123}, "path=123 has type int; allowed: the path"),
        ({"predictor": None}, "predictor=None has type NoneType; allowed: the path"),
        ({"predictor": 3}, "predictor=3 has type int; allowed: the path"),
        ({"rows": "8"}, "rows is '8', allowed 1..64"),
        ({"rows": True}, "rows is True, allowed 1..64"),
        ({"seed": 1.5}, "seed is 1.5, allowed >= 0"),
        ({"seed": None}, "seed is None, allowed >= 0"),
    ],
)
def test_options_of_a_wrong_kind_are_named(options, message, tiny_llama, tmp_path):
    make_drafter("dscale", tiny_llama, tmp_path)
    given = {"path": tmp_path / "dflash", "predictor": tmp_path / "predictor.safetensors"} | options
    with pytest.raises(ValueError, match=message):
        build_dscale(tiny_llama, **given)
