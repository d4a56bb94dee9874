"""What a training notebook is asked for is checked before text and states of the target are made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from train_setup import VOCAB, tiny_model

from workbench.measure.parameters import RUN_DIR, read_parameters, read_yaml
from workbench.paths import notebooks_dir
from workbench.train.checkpoint import write_checkpoint
from workbench.train.dart_recipe import DartRecipe
from workbench.train.dflash_recipe import DFlashRecipe
from workbench.train.plan import TrainingPlan

NOTEBOOK = notebooks_dir() / "02_train_drafter.ipynb"
PRESETS = sorted((notebooks_dir() / "params").glob("02_train_drafter.*.yaml"))


def params(**changes) -> dict:
    """Defaults of the notebook, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items() if name != RUN_DIR}
    assert changes.keys() <= values.keys()
    return values | changes


def test_the_plan_of_parameters(tmp_path):
    plan = TrainingPlan.of(params(num_steps=7, ema_decay=0.0, num_heads=3, device="cuda:1"))
    assert isinstance(plan.recipe, DartRecipe) and plan.recipe.num_heads == 3
    assert (plan.config.steps, plan.config.seconds, plan.config.ema_decay) == (7, None, 0.0)
    assert plan.config.bfloat16 and plan.config.save_every == 500
    write_checkpoint(tmp_path / "state", {}, {})
    by_clock = TrainingPlan.of(params(method="dflash", num_steps=0, seconds=1.5, resume=str(tmp_path / "state")))
    assert isinstance(by_clock.recipe, DFlashRecipe) and not by_clock.config.bfloat16
    assert (by_clock.config.steps, by_clock.config.seconds) == (None, 1.5)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_make_plans_for_the_embedded_target(path, embedded):
    plan = TrainingPlan.of(params(**read_yaml(path, read_parameters(NOTEBOOK))))
    plan.recipe.check(embedded.model, embedded.tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, r"num_steps=0, seconds=0\.0; allowed: one of them above 0"),
        ({"seconds": 5.0}, r"num_steps=2000, seconds=5\.0; allowed: one of them above 0"),
        ({"num_steps": -1}, "num_steps=-1, seconds="),
        ({"num_steps": 0, "seconds": -1.0}, r"seconds=-1\.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"ema_decay": 1.0}, r"ema_decay=1\.0"),
        ({"log_every": 0}, "log_every=0"),
        ({"learning_rate": -0.1}, r"learning_rate=-0\.1"),
        ({"held_out": 1.0}, r"held_out=1\.0 outside 0\.\.1"),
        ({"held_out": 0.0}, r"held_out=0\.0 outside"),
        ({"walked": 0}, "walked=0 must be at least 1"),
        ({"num_samples": -1}, "num_samples=-1 must be at least 0"),
        ({"num_prompts": 0}, "num_prompts=0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"method": "medusa"}, "method='medusa'"),
        ({"resume": "nowhere"}, "nowhere is no readable checkpoint"),
        ({"resume": str(NOTEBOOK)}, "is no readable checkpoint"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TrainingPlan.of(params(**change))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (DFlashRecipe(block_size=300), r"block_size=300 outside 1\.\.256"),
        (DFlashRecipe(num_layers=129), r"num_hidden_layers=129 outside 1\.\.128"),
        (DFlashRecipe(num_heads=7), "num_attention_heads=7 is no multiple"),
        (DFlashRecipe(num_kv_heads=3), "num_key_value_heads=3"),
        (DFlashRecipe(num_taps=5), "num_taps=5: num_target_layers=7 is too few for 5"),
        (DFlashRecipe(num_taps=200), "num_taps=200: "),
        (DFlashRecipe(mask_token_id=VOCAB), f"mask_token_id={VOCAB} outside"),
        (DFlashRecipe(mask_token_id=-1), "mask_token_id=-1: the tokenizer has no special id"),
        (DartRecipe(draft_vocab_size=10, num_kv_heads=3), "num_key_value_heads=3"),
        (DartRecipe(draft_vocab_size=VOCAB + 1), f"draft_vocab_size={VOCAB + 1} above"),
        (DartRecipe(draft_vocab_size=10, num_blocks=9, row_len=8), r"num_blocks=9 outside 1\.\.row_len=8"),
        (DFlashRecipe(num_blocks=9, row_len=8), r"num_blocks=9 outside 1\.\.row_len=8"),
    ],
)
def test_sizes_that_a_target_rules_out(recipe, message):
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    tokenizer = _Full(added_tokens_decoder={}, **dict.fromkeys(names))
    with pytest.raises(ValueError, match=message):
        recipe.check(tiny_model(), tokenizer)


class _Full(SimpleNamespace):
    """A tokenizer that uses every row of the embedding."""

    def __len__(self) -> int:
        return VOCAB


def test_sizes_that_a_target_allows():
    DFlashRecipe(num_taps=4, mask_token_id=VOCAB - 1, num_heads=6, num_kv_heads=3).check(tiny_model())
    DartRecipe(draft_vocab_size=VOCAB).check(tiny_model())
    with pytest.raises(ValueError, match="mask_token_id=-1 needs a tokenizer"):
        DFlashRecipe().check(tiny_model())
