"""Where training text comes from: shards in a folder, or prompts that the target answers on the spot.

Drafters and predictors of acceptance learn from different prompts: on text that a drafter was trained on it is accepted
too often, and a predictor would come to expect as much of all text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workbench.budget.trace import prompt_digest
from workbench.decode.engine import SamplingConfig, generate
from workbench.drafters.ar import ArDrafter
from workbench.models.target import Target
from workbench.paths import external_data_dir
from workbench.prompts import load_prompts
from workbench.train.data import Corpus, concatenate, load_shards

SHARDS = "train-*.npz"
#: Stands for the folder that the environment variable of this name names.
ENVIRONMENT = "WORKBENCH_DATA"
#: Whose prompts are taken.
USES = ("drafters", "predictors", "all")

#: Prompts whose digest starts with a byte below this (one in 32) are kept from drafters, for predictors to learn on.
_KEPT_BYTES = 8


def is_kept_for_predictors(prompt_ids: Sequence[int]) -> bool:
    """Whether no drafter may be trained on a prompt; a function of the prompt alone."""
    return int(prompt_digest(prompt_ids)[:2], 16) < _KEPT_BYTES


def kept_for_predictors(corpus: Corpus) -> np.ndarray:
    """[n] bool, samples whose prompts no drafter may be trained on."""
    prompts = (corpus.sample(i)[: corpus.prompt_len[i]] for i in range(corpus.num_samples))
    return np.array([is_kept_for_predictors(prompt) for prompt in prompts], bool)


def find_shards(folder: str | Path | None = None) -> list[Path]:
    """Training shards in a folder, or below the one that `WORKBENCH_DATA` names; an empty list when neither has any.

    Raises:
        ValueError: a folder is given and holds no shard.
    """
    if folder:
        found = sorted(Path(folder).expanduser().glob(SHARDS))
        if not found:
            raise ValueError(f"data={str(folder)!r} holds no {SHARDS}")
        return found
    data = external_data_dir()
    return sorted([*data.glob(SHARDS), *data.glob(f"*/{SHARDS}")]) if data else []


def shard_corpus(
    paths: Sequence[Path], vocab_size: int, num_samples: int, max_len: int, use: str = "drafters"
) -> Corpus:
    """The first samples of shards that are short enough and for this use.

    Args:
        paths: shards; only as many are read as are needed.
        vocab_size: of the target that the shards must belong to.
        num_samples: samples kept; 0 for all.
        max_len: longest sample kept.
        use: one of USES.

    Raises:
        ValueError: an id outside the vocabulary, an unknown use, or no sample is left.
    """
    _check_use(use)
    kept: list[Corpus] = []
    for path in paths:
        corpus = load_shards([path])
        if len(corpus.tokens) and corpus.tokens.max() >= vocab_size:
            raise ValueError(f"{path} holds id {corpus.tokens.max()}; the target's vocabulary ends at {vocab_size - 1}")
        corpus = corpus.select(corpus.lengths <= max_len)
        if use != "all":
            corpus = corpus.select(kept_for_predictors(corpus) == (use == "predictors"))
        kept.append(corpus)
        if num_samples and sum(c.num_samples for c in kept) >= num_samples:
            break
    whole = concatenate(kept)
    if not whole.num_samples:
        wanted = "" if use == "all" else f" and a prompt that is for {use}"
        raise ValueError(f"no sample has {max_len} tokens or fewer{wanted}")
    return whole.select(np.arange(min(num_samples or whole.num_samples, whole.num_samples)))


def predictor_corpus(folder: str | Path, target: Target) -> Corpus:
    """The samples of shards whose prompts drafters are kept from.

    Args:
        folder: of the shards, or `ENVIRONMENT`.
        target: the shards must hold ids of its tokenizer.

    Raises:
        ValueError: no shards there, or see `shard_corpus`.
    """
    shards = find_shards(None if folder == ENVIRONMENT else folder)
    if not shards:
        raise ValueError(f"{ENVIRONMENT} is not set, or names a folder without {SHARDS}")
    return shard_corpus(shards, target.vocab_size, 0, target.context_limit, use="predictors")


def answered_corpus(
    target: Target,
    prompt_sets: Sequence[str],
    num_prompts: int,
    max_new_tokens: int,
    sampled: bool = True,
    slots: int = 8,
    seed: int = 0,
    use: str = "drafters",
) -> Corpus:
    """Prompts answered by the target itself, greedily and, if asked for, once more at temperature 1.

    Args:
        target: answers.
        prompt_sets: names for `load_prompts`.
        num_prompts: prompts of each set.
        max_new_tokens: most tokens of an answer.
        sampled: also draw a sampled answer to every prompt.
        slots: prompts answered side by side.
        seed: of the sampled answers.
        use: one of USES; the prompts of others are left out.

    Raises:
        ValueError: an unknown use, or no prompt is left.
    """
    _check_use(use)
    asked = [target.encode_chat(p.messages()) for name in prompt_sets for p in load_prompts(name, limit=num_prompts)]
    prompts = [p for p in asked if use == "all" or is_kept_for_predictors(p) == (use == "predictors")]
    if not prompts:
        raise ValueError(
            f"prompt_sets={list(prompt_sets)}, num_prompts={num_prompts}: none of the {len(asked)} prompts is for {use}"
        )
    corpora = []
    for temperature in (0.0, 1.0) if sampled else (0.0,):
        sampling = SamplingConfig(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        answers = generate(target, ArDrafter(), prompts, sampling, slots=slots, progress=True)
        pairs = [(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
        corpora.append(Corpus.from_responses(pairs, sampled=temperature > 0))
    return concatenate(corpora)


def training_text(
    target: Target,
    data: str,
    num_samples: int,
    max_len: int,
    prompt_sets: Sequence[str],
    num_prompts: int,
    max_new_tokens: int,
    seed: int = 0,
    leave_out_predictor_prompts: bool = True,
) -> Corpus:
    """Text from shards if there are any, else from prompts that the target answers.

    Args:
        target: the shards must hold ids of its tokenizer.
        data: see `find_shards`.
        num_samples, max_len: see `shard_corpus`.
        prompt_sets, num_prompts, max_new_tokens, seed: see `answered_corpus`; answers longer than `max_len` with their
            prompt are left out.
        leave_out_predictor_prompts: take no prompt that `is_kept_for_predictors`.

    Raises:
        ValueError: see `find_shards`, `shard_corpus` and `answered_corpus`.
    """
    use = "drafters" if leave_out_predictor_prompts else "all"
    shards = find_shards(data)
    if shards:
        return shard_corpus(shards, target.vocab_size, num_samples, max_len, use)
    corpus = answered_corpus(target, prompt_sets, num_prompts, max_new_tokens, seed=seed, use=use)
    return corpus.select(corpus.lengths <= max_len)


def check_held_out(share: float) -> None:
    """Refuses shares that leave nothing on one side.

    Raises:
        ValueError: not 0 < share < 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"held_out={share} outside 0..1 (both excluded)")


def split_held_out(corpus: Corpus, share: float) -> tuple[Corpus, Corpus]:
    """(training samples, held-out samples): every prompt goes to one side with all its responses.

    Args:
        corpus: samples; those with the same prompt ids count as one prompt.
        share: of the prompts that are held out, at least one; 0 < share < 1.

    Raises:
        ValueError: `share` out of range, or fewer than two prompts.
    """
    check_held_out(share)
    prompts: dict[bytes, list[int]] = {}
    for i in range(corpus.num_samples):
        prompts.setdefault(corpus.sample(i)[: corpus.prompt_len[i]].tobytes(), []).append(i)
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts cannot be split into training and held-out ones")
    count = min(len(prompts) - 1, max(1, round(share * len(prompts))))
    held = np.zeros(corpus.num_samples, np.bool_)
    for samples in list(prompts.values())[-count:]:
        held[samples] = True
    return corpus.select(~held), corpus.select(held)


def _check_use(use: str) -> None:
    if use not in USES:
        raise ValueError(f"use={use!r}; allowed: {', '.join(USES)}")
