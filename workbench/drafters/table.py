"""All drafters by name. A new one is one file and one line here; tests, timings and notebooks take it from there."""

from __future__ import annotations

from collections.abc import Callable

from workbench.drafters.ar import build_ar
from workbench.drafters.dart import build_dart
from workbench.drafters.dflash import build_dflash
from workbench.drafters.dscale import build_dscale
from workbench.drafters.ngram import build_ngram
from workbench.drafters.oracle import build_anti, build_coin, build_oracle, build_scripted
from workbench.types import Drafter

#: name -> builder(target, path=None, **options)
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "ar": build_ar,
    "dart": build_dart,
    "dflash": build_dflash,
    "dscale": build_dscale,
    "ngram": build_ngram,
    "oracle": build_oracle,
    "anti": build_anti,
    "coin": build_coin,
    "scripted": build_scripted,
}
