"""All recipes by the name of their method. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from workbench.train.dart_recipe import DartRecipe
from workbench.train.dflash_recipe import DFlashRecipe
from workbench.train.recipe import Recipe

RECIPES: dict[str, type[Recipe]] = {
    "dart": DartRecipe,
    "dflash": DFlashRecipe,
}


def build_recipe(method: str, params: Mapping[str, Any]) -> Recipe:
    """The recipe of a method from parameters that serve all of them.

    Args:
        method: key of `RECIPES`.
        params: by name; those that the method does not have are ignored, those that are missing keep their default, and
            so does a `gamma` of 0, since its scale differs from method to method.

    Raises:
        ValueError: an unknown method, or a field outside its range.
    """
    if method not in RECIPES:
        raise ValueError(f"method={method!r}; allowed: {', '.join(RECIPES)}")
    kind = RECIPES[method]
    chosen = {field.name: params[field.name] for field in fields(kind) if field.name in params}
    if not chosen.get("gamma"):
        chosen.pop("gamma", None)
    return kind(**chosen)
