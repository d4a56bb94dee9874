"""Where training text comes from: shards in a folder, or prompts that the target answers on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workbench.decode.engine import SamplingConfig, generate
from workbench.drafters.ar import ArDrafter
from workbench.models.target import Target
from workbench.paths import external_data_dir
from workbench.prompts import load_prompts
from workbench.train.data import Corpus, concatenate, load_shards

SHARDS = "train-*.npz"


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


def shard_corpus(paths: Sequence[Path], vocab_size: int, num_samples: int, max_len: int) -> Corpus:
    """The first samples of shards that are short enough.

    Args:
        paths: shards; only as many are read as are needed.
        vocab_size: of the target that the shards must belong to.
        num_samples: samples kept; 0 for all.
        max_len: longest sample kept.

    Raises:
        ValueError: an id outside the vocabulary, or no sample is short enough.
    """
    kept: list[Corpus] = []
    for path in paths:
        corpus = load_shards([path])
        if len(corpus.tokens) and corpus.tokens.max() >= vocab_size:
            raise ValueError(f"{path} holds id {corpus.tokens.max()}; the target's vocabulary ends at {vocab_size - 1}")
        kept.append(corpus.select(corpus.lengths <= max_len))
        if num_samples and sum(c.num_samples for c in kept) >= num_samples:
            break
    whole = concatenate(kept)
    if not whole.num_samples:
        raise ValueError(f"no sample has {max_len} tokens or fewer")
    return whole.select(np.arange(min(num_samples or whole.num_samples, whole.num_samples)))


def answered_corpus(
    target: Target,
    prompt_sets: Sequence[str],
    num_prompts: int,
    max_new_tokens: int,
    sampled: bool = True,
    slots: int = 8,
    seed: int = 0,
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
    """
    prompts = [target.encode_chat(p.messages()) for name in prompt_sets for p in load_prompts(name, limit=num_prompts)]
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
) -> Corpus:
    """Text from shards if there are any, else from prompts that the target answers.

    Args:
        target: the shards must hold ids of its tokenizer.
        data: see `find_shards`.
        num_samples, max_len: see `shard_corpus`.
        prompt_sets, num_prompts, max_new_tokens, seed: see `answered_corpus`; answers longer than `max_len` with their
            prompt are left out.
    """
    shards = find_shards(data)
    if shards:
        return shard_corpus(shards, target.vocab_size, num_samples, max_len)
    corpus = answered_corpus(target, prompt_sets, num_prompts, max_new_tokens, seed=seed)
    return corpus.select(corpus.lengths <= max_len)


def split_held_out(corpus: Corpus, share: float) -> tuple[Corpus, Corpus]:
    """(training samples, held-out samples): every prompt goes to one side with all its responses.

    Args:
        corpus: samples; those with the same prompt ids count as one prompt.
        share: of the prompts that are held out, at least one; 0 < share < 1.

    Raises:
        ValueError: `share` out of range, or fewer than two prompts.
    """
    if not 0 < share < 1:
        raise ValueError(f"held_out={share} outside 0..1 (both excluded)")
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
