"""What a serving notebook does with traces: record them from manifests, train on them, replay them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trace_setup import FuzzyChain, made_trace

from workbench.budget.features import DraftFeatures
from workbench.budget.policy import BudgetPolicy, allocate_full
from workbench.budget.predictor import AcceptancePredictor, PredictorInfo, PredictorScorer, save_predictor
from workbench.budget.table import build_policy
from workbench.budget.trace import Trace
from workbench.decode.engine import generate
from workbench.drafters.ar import build_ar
from workbench.load import load_method
from workbench.measure import serving_trace
from workbench.measure.manifest import MIXED, Manifest, load_manifests
from workbench.measure.predictor_quality import quality_rows, reliability_rows
from workbench.measure.replay import Replay
from workbench.measure.serving_predictor import (
    check_predictor,
    features_of,
    predictor_of,
    with_policy,
    with_predictor,
)
from workbench.measure.serving_trace import (
    checked_policy,
    drawn_rounds,
    kept_requests,
    manifest_requests,
    quality_tables,
    record_trace,
    replay_rows,
    rescored,
    retention_checks,
    train_scorer,
    training_tables,
)
from workbench.train.data import Corpus
from workbench.train.predictor_objective import PredictorRecipe
from workbench.train.text import is_kept_for_predictors


def scorer_for(target, seed=0, width=16) -> PredictorScorer:
    torch.manual_seed(seed)
    features = features_of(target, FuzzyChain(target, None, [], width))
    return PredictorScorer(AcceptancePredictor(width).requires_grad_(False), features)


@pytest.fixture(scope="module")
def manifests(tiny_llama):
    rng = np.random.default_rng(5)
    prompts = {f"p{i}": rng.integers(3, 97, 4 + i).tolist() for i in range(4)}
    return {"one": Manifest.build(prompts, 4, 40), "two": Manifest.build({"q": [7, 8, 9]}, 2, 30)}


@pytest.fixture(scope="module")
def chains(tiny_llama, manifests):
    """Knows the greedy outputs of the manifests, and goes by DScale's policy until told otherwise."""
    texts = [
        [*e.prompt_ids, *generate(tiny_llama, build_ar(tiny_llama), [e.prompt_ids], e.sampling)[0].token_ids]
        for manifest in manifests.values()
        for e in manifest
    ]
    return FuzzyChain(tiny_llama, build_policy("product", 4.0), texts)


def test_a_policy_is_exchanged_and_the_rest_is_shared(tiny_llama, chains):
    policy = build_policy("uniform", 3.0)
    twin = with_policy(chains, policy)
    assert twin.policy is policy and chains.policy.name == "product"
    assert twin._texts is chains._texts


def test_predictors_are_found_and_exchanged(tiny_llama):
    old, new = scorer_for(tiny_llama), scorer_for(tiny_llama, 1)
    drafters = {
        "plain": FuzzyChain(tiny_llama, build_policy("full"), []),
        "product": FuzzyChain(tiny_llama, build_policy("product"), []),
        "dscale": FuzzyChain(tiny_llama, build_policy("dvl", 6.0, old), []),
    }
    assert predictor_of(drafters) is old
    assert predictor_of({"plain": drafters["plain"]}) is None
    changed = with_predictor(drafters, new)
    assert list(changed) == list(drafters)
    assert changed["plain"] is drafters["plain"] and changed["product"] is drafters["product"]
    assert changed["dscale"].policy.scorer is new and drafters["dscale"].policy.scorer is old
    assert (changed["dscale"].policy.name, changed["dscale"].policy.rows) == ("dvl", 6.0)
    assert with_predictor(drafters, None) == drafters


@pytest.fixture(scope="module")
def mixed_widths(tiny_llama):
    """Full-width drafts of 8 rows, and DScale's of 16."""
    return {
        "short": FuzzyChain(tiny_llama, build_policy("full"), [], 8),
        "dscale": FuzzyChain(tiny_llama, build_policy("dvl", 6.0, scorer_for(tiny_llama)), []),
    }


def test_a_predictor_of_another_width_is_put_into_no_drafter(tiny_llama, mixed_widths):
    with pytest.raises(ValueError, match="for drafts of 8 rows, those of method 'dscale' have 16"):
        with_predictor(mixed_widths, scorer_for(tiny_llama, width=8))
    assert with_predictor(mixed_widths, scorer_for(tiny_llama))["short"] is mixed_widths["short"]


def test_widths_are_compared_before_anything_is_decoded(tiny_llama, manifests, mixed_widths):
    judge, lessons = predictor_of(mixed_widths), manifest_requests(manifests)
    with pytest.raises(ValueError, match="for drafts of 16 rows, those of method 'short' have 8"):
        check_predictor(mixed_widths, judge, "short")
    with pytest.raises(ValueError, match="for drafts of 8 rows, those of method 'dscale' have 16"):
        check_predictor(mixed_widths, judge, "short", lessons)
    trace = replace(made_trace(), width=8, limit=np.zeros(100, np.int16), accepted=np.zeros(100, np.int16), scores={})
    with pytest.raises(ValueError, match="the trace has drafts of 8 rows, the predictor is for 16"):
        check_predictor(mixed_widths, judge, trace=trace)
    check_predictor(mixed_widths, judge, "dscale", lessons, trace.without_features())
    check_predictor(mixed_widths, judge)
    check_predictor({"short": mixed_widths["short"]}, None, "short", None, trace)


def test_lessons_must_have_room_for_a_whole_draft(tiny_llama, chains):
    drafters = {"chains": chains}
    for most, message in ((16, "max_new_tokens=16 leaves no draft of 16 rows whole"), (17, None)):
        prompts = {f"p{i}": [i + 3, 5] for i in range(6)}
        lessons = manifest_requests({"one": Manifest.build(prompts, 6, most)})
        if message is None:
            check_predictor(drafters, None, "chains", lessons)
            run = train_scorer(tiny_llama, chains, lessons, [], PredictorRecipe(epochs=1))[1]
            assert run.num_train > 0, "the first draft of a request is whole"
            continue
        with pytest.raises(ValueError, match=message):
            check_predictor(drafters, None, "chains", lessons)
        with pytest.raises(ValueError, match=message):
            train_scorer(tiny_llama, chains, lessons, [], PredictorRecipe(epochs=1))


def test_recording_verifies_everything_whatever_the_policy(tiny_llama, manifests, chains):
    trace = record_trace(tiny_llama, chains, manifests, scorer_for(tiny_llama), slots=3)
    assert set(trace.scores) == {"product", "minimum", "gap", "random", "predictor"}
    assert trace.features is None and trace.width == 16
    assert [p.label for p in trace.prompts] == ["one"] * 4 + ["two"] * 2
    assert (trace.limit == 15).mean() > 0.5, "only drafts near the end are cut, not those of a policy of 4 rows"
    assert trace.accepted.max() > 4
    assert Replay(trace).lengths("full").mean() > 8
    without = record_trace(tiny_llama, chains, {"two": manifests["two"]})
    assert "predictor" not in without.scores and checked_policy(without) == "product"


def test_looped_outputs_are_marked(tiny_llama, manifests, chains, monkeypatch):
    monkeypatch.setattr(serving_trace, "is_looped", lambda output: len(output) == 30)
    trace = record_trace(tiny_llama, chains, manifests, slots=3)
    assert [prompt.looped for prompt in trace.prompts] == [False] * 4 + [True] * 2


def test_training_a_scorer(tiny_llama, manifests, chains):
    rated = {"three": Manifest.build({"r": [1, 2]}, 1, 24)}
    lessons = manifests | {"four": Manifest.build({"s": [11, 12], "t": [13, 14]}, 2, 40)}
    scorer, run = train_scorer(
        tiny_llama,
        chains,
        manifest_requests(lessons),
        rated.values(),
        PredictorRecipe(epochs=2, batch_size=16),
        slots=3,
    )
    assert run.num_train > run.num_validation > 0 and len(run.rows) == 2
    assert isinstance(scorer.features, DraftFeatures) and scorer.predictor is not run.predictor
    for one, two in zip(scorer.predictor.parameters(), run.predictor.parameters(), strict=True):
        assert torch.equal(one, two)
    trace = record_trace(tiny_llama, chains, rated, scorer, scorer.features)
    assert np.isfinite(trace.scores["predictor"]).all() and trace.features.shape[1] == scorer.features.size
    tables = training_tables(run)
    assert [row["epoch"] for row in tables["training"]] == [1, 2] and tables["validation"][0]["group"] == "all"
    (outcome,) = tables["predictor"]
    assert outcome["validation_loss"] == min(row["validation_loss"] for row in tables["training"])
    assert (outcome["num_train"], outcome["constant_loss"]) == (run.num_train, run.constant_loss)


def test_no_prompt_is_rated_that_was_trained_on(tiny_llama, manifests, chains):
    rated = {"three": Manifest.build({"r": [1, 2], "s": [7, 8, 9]}, 2, 8)}
    with pytest.raises(ValueError, match="1 prompts to train on are also among those to rate on"):
        train_scorer(tiny_llama, chains, manifest_requests(manifests), rated.values(), PredictorRecipe(epochs=1))


def test_no_prompt_of_a_trace_file_is_trained_on(tiny_llama, manifests, chains):
    trace = record_trace(tiny_llama, chains, {"three": Manifest.build({"r": [1, 2], "s": [7, 8, 9]}, 2, 8)})
    with pytest.raises(ValueError, match="1 prompts to train on are also among those to rate on"):
        train_scorer(tiny_llama, chains, manifest_requests(manifests), [], PredictorRecipe(epochs=1), trace=trace)


def test_the_recording_to_train_on_can_be_cut(tiny_llama, manifests, chains):
    lessons, recipe = manifest_requests(manifests), PredictorRecipe(epochs=1, batch_size=4)
    runs = [train_scorer(tiny_llama, chains, lessons, [], recipe, 3, rows)[1] for rows in (10, 0)]
    rows = [run.num_train + run.num_validation for run in runs]
    assert rows[0] <= 12 < rows[1], "the round that reaches ten drafts of three requests is the last"


# --- what a record holds


def test_what_figures_draw_is_in_tables():
    trace = made_trace()
    tables = quality_tables(trace)
    assert tables["quality"] == quality_rows(trace) and tables["reliability"] == reliability_rows(trace)
    assert [row["position"] for row in tables["calibration"]] == list(range(1, 16))
    bare = replace(trace, scores={"product": trace.scores["predictor"]})
    assert quality_tables(bare) == quality_tables(None) == {"quality": [], "calibration": [], "reliability": []}


def test_drawn_rounds():
    trace = made_trace(num_rounds=3)
    rows = drawn_rounds(trace, 2, 6.0)
    assert [row["round"] for row in rows] == [0] * 5 + [1] * 5
    assert {(row["policy"], row["rows"]) for row in rows} == {("dvl", 6.0)}
    drawn = [{name: row[name] for name in row if name not in ("round", "policy", "rows")} for row in rows[5:]]
    assert drawn == Replay(trace).round_rows(1, "dvl", 6.0)
    assert {row["round"] for row in drawn_rounds(trace, 9, 6.0)} == {0, 1, 2}
    assert drawn_rounds(None, 2, 6.0) == drawn_rounds(trace, 0, 6.0) == []


# --- the shipped pair


def test_the_shipped_drafter_teaches_a_predictor(embedded, tmp_path):
    """From a shard to a predictor, on those of its prompts that the drafter was kept from."""
    texts = (f"Name a word that begins with {letter} and {other}." for letter in "abcdefgh" for other in "ijklmnop")
    prompts = [embedded.encode_chat([{"role": "user", "content": text}]) for text in texts]
    kept = [prompt for prompt in prompts if is_kept_for_predictors(prompt)]
    corpus = Corpus.from_responses([(prompt, [5, 2]) for prompt in prompts[:12] + kept])
    np.savez(tmp_path / "train-0.npz", **{name: getattr(corpus, name) for name in corpus.__dataclass_fields__})
    requests, labels = lessons = kept_requests(embedded, tmp_path, 20, sampled_share=0.5)
    assert sorted(r.prompt_ids for r in requests) == sorted(map(tuple, kept)) and labels == ["0"] * len(kept)
    assert sum(r.sampling.temperature == 1 for r in requests) == len(kept) // 2
    drafter = load_method("dflash", embedded)
    recipe = PredictorRecipe(epochs=1, batch_size=4)
    scorer, run = train_scorer(embedded, drafter, lessons, [], recipe, slots=4, max_rows=30)
    assert run.predictor.width == 16 and 4 < run.num_train + run.num_validation <= 33
    info = PredictorInfo.of(scorer.features)
    save_predictor(run.predictor, tmp_path / "p", info)
    again = load_method("dscale", embedded, predictor=tmp_path / "p")
    assert torch.equal(again.policy.scorer.predictor.layers[0].weight, scorer.predictor.layers[0].weight)


def test_a_file_is_scored_anew_where_it_can_be(tiny_llama, manifests, chains, tmp_path):
    first, second = scorer_for(tiny_llama), scorer_for(tiny_llama, 1)
    features = features_of(tiny_llama, chains)
    live = record_trace(tiny_llama, chains, manifests, second, slots=3)
    record_trace(tiny_llama, chains, manifests, first, features, slots=3).save(tmp_path / "t")
    kept = Trace.load(tmp_path / "t")
    anew = rescored(kept, second)
    assert np.allclose(anew.scores["predictor"], live.scores["predictor"], atol=2e-3), "features are kept in float16"
    assert not np.allclose(rescored(kept).scores["predictor"], live.scores["predictor"], atol=2e-3)
    assert rescored(live, first) is live
    short = FuzzyChain(tiny_llama, build_policy("full"), [], 8)
    other = record_trace(tiny_llama, short, {"two": manifests["two"]}, features=features_of(tiny_llama, short))
    with pytest.raises(ValueError, match="the trace has drafts of 8 rows, the predictor is for 16"):
        rescored(other, first)


# --- replay


def test_replay_leaves_out_what_the_trace_cannot_tell():
    trace = made_trace()
    rows = replay_rows(trace, ["uniform", "dvl", "product", "shared", "oracle", "full"], [4.0, 8.0])
    assert [(row["policy"], row["rows"]) for row in rows] == [
        *(("uniform", 4.0), ("uniform", 8.0), ("dvl", 4.0), ("dvl", 8.0), ("oracle", 4.0), ("oracle", 8.0)),
        ("full", 4.0),
    ]
    with pytest.raises(ValueError, match=r"policies=\['dlv'\] are unknown; allowed: full, uniform"):
        replay_rows(trace, ["dvl", "dlv"], [8.0])


def test_retention_checks():
    trace = made_trace()
    checks = retention_checks(trace, 8.0, 0.99, 0.2, suffix="_x")
    row = Replay(trace).row("dvl", 8.0)
    assert checks["retention_seed_x"].value == row["retention_seed"] and checks["retention_seed_x"].ok is False
    assert checks["retention_adjusted_x"].value == row["retention"] and checks["retention_adjusted_x"].ok is True
    assert [check.ok for check in retention_checks(trace, 8.0).values()] == [None, None]
    products = replace(trace, scores={"product": trace.scores["predictor"]})
    assert retention_checks(products, 8.0)["retention_adjusted"].value == pytest.approx(row["retention"])


# --- manifests of prompt sets


class Lettered:
    """A target as far as manifests see it: a token a letter."""

    def encode_chat(self, messages):
        return [ord(letter) for letter in messages[-1]["content"]]


@pytest.fixture
def sets(tmp_path):
    for name, texts in {"a": ("one", "two", "three"), "b": ("x",)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def test_a_manifest_a_set(sets):
    manifests = load_manifests(Lettered(), sets, 5, 8, seed=2, num_prompts=2)
    assert list(manifests) == sets
    texts = ["".join(map(chr, entry.prompt_ids)) for entry in manifests[sets[0]]]
    assert texts == ["one", "two", "one", "two", "one"] and manifests[sets[0]].entries[0].seed == 2
    assert manifests[sets[1]].num_prompts == 1 and len(manifests[sets[1]]) == 5


def test_a_mixed_manifest_takes_turns(sets):
    (name,) = manifests = load_manifests(Lettered(), sets, 5, 8, mixed=True)
    assert name == MIXED
    texts = ["".join(map(chr, entry.prompt_ids)) for entry in manifests[MIXED]]
    assert texts == ["one", "x", "two", "three", "one"]
    assert len({entry.id for entry in manifests[MIXED]}) == 4


@pytest.mark.parametrize("wrong", [[], ["maths", "maths"]])
def test_sets_must_be_named_once(wrong):
    with pytest.raises(ValueError, match="prompt_sets="):
        load_manifests(Lettered(), wrong, 5, 8)


def test_the_recording_policy_is_what_the_trace_was_made_with(tiny_llama, manifests, chains):
    seen = []

    class Watched(FuzzyChain):
        def session(self, slots, max_len):
            seen.append(self.policy)
            return self

    watched = Watched(tiny_llama, chains.policy, [])
    record_trace(tiny_llama, watched, {"two": manifests["two"]})
    assert isinstance(seen[0], BudgetPolicy) and seen[0].allocator is allocate_full
