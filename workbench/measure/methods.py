"""Methods as notebooks name them: `dart`, or a variant with options, `dart:trie=none,num_nodes=31`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import yaml

from workbench.drafters.table import DRAFTERS
from workbench.load import load_method
from workbench.measure.compare import BASELINE
from workbench.measure.parameters import NumberLoader
from workbench.models.target import Target
from workbench.types import Drafter


def parse_method(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name:option=value,option=value`; values as in YAML, `none` for None.

    Raises:
        ValueError: the text has another form, or an option is given twice.
    """
    name, _, text = spec.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        if not equals or not option.strip() or option.strip() in options:
            raise ValueError(f"method={spec!r}: {part!r} must be option=value, each option once")
        try:
            options[option.strip()] = _plain(yaml.load(value, Loader=NumberLoader))
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"method={spec!r}: the value of {option.strip()} is no YAML: {error}") from error
    return name.strip(), options


def build_methods(specs: Sequence[str], target: Target, **defaults: Any) -> dict[str, Drafter]:
    """Drafters by their text, the baseline "ar" first whether or not it is named.

    Args:
        specs: see `parse_method`; equal ones count once.
        target: what they draft for.
        defaults: options for every method that has them; the text of a method wins. "none" stands for None, "default"
            leaves the method its own choice.

    Raises:
        ValueError: an unknown method or option, or a default that no method of the table has.
    """
    known = {name: set(inspect.signature(builder).parameters) for name, builder in DRAFTERS.items()}
    unused = [option for option in defaults if not any(option in options for options in known.values())]
    if unused:
        raise ValueError(f"defaults={unused}: no method has such an option")
    drafters = {}
    for spec in dict.fromkeys([BASELINE, *specs]):
        name, options = parse_method(spec)
        has = known.get(name, set())
        shared = {o: _plain(value) for o, value in defaults.items() if o in has and value != "default"}
        drafters[spec] = load_method(name, target, **(shared | options))
    return drafters


def _plain(value: Any) -> Any:
    return None if value == "none" else value
