"""Request manifests: what they hold, and that their digest says so."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from workbench.measure.manifest import Manifest, ManifestEntry

PROMPTS = {"a": [1, 2, 3], "b": [4], "c": [5, 6]}


def test_prompts_are_cycled_in_their_order():
    manifest = Manifest.build(PROMPTS, num_requests=7, max_new_tokens=9, temperature=0.5, seed=40)
    assert [entry.id for entry in manifest] == ["a", "b", "c", "a", "b", "c", "a"]
    assert [entry.repetition for entry in manifest] == [0, 0, 0, 1, 1, 1, 2]
    assert [entry.seed for entry in manifest] == list(range(40, 47))
    assert manifest.entries[4].prompt_ids == (4,)
    assert (len(manifest), manifest.num_prompts, manifest.max_len, manifest.greedy) == (7, 3, 12, False)
    request = manifest.entries[5].request
    assert request.prompt_ids == (5, 6)
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (9, 0.5, 45)


def test_fewer_requests_than_prompts():
    assert [entry.id for entry in Manifest.build(PROMPTS, 2, 5)] == ["a", "b"]


def test_the_digest_is_that_of_the_file(tmp_path):
    manifest = Manifest.build(PROMPTS, 5, 9)
    path = manifest.save(tmp_path / "m.jsonl")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest.digest
    again = Manifest.load(path)
    assert again == manifest and again.digest == manifest.digest
    assert len(path.read_text().splitlines()) == 5


def test_the_digest_is_fixed():
    """Another digest for the same requests would make old records incomparable."""
    entry = ManifestEntry("a", (1, 2), 8, 0.0, 3, 1)
    line = '{"id":"a","max_new_tokens":8,"prompt_ids":[1,2],"repetition":1,"seed":3,"temperature":0.0}\n'
    assert Manifest((entry,)).digest == hashlib.sha256(line.encode()).hexdigest()
    assert Manifest((ManifestEntry("a", np.array([1, 2]), np.int64(8), 0, np.int32(3), 1),)).digest == (
        Manifest((entry,)).digest
    )


@pytest.mark.parametrize(
    "change",
    [{"id": "z"}, {"prompt_ids": (1, 3)}, {"max_new_tokens": 7}, {"temperature": 0.1}, {"seed": 4}, {"repetition": 0}],
)
def test_every_field_and_the_order_count(change):
    first, second = ManifestEntry("a", (1, 2), 8, 0.0, 3, 1), ManifestEntry("b", (9,), 8)
    whole = Manifest((first, second)).digest
    assert Manifest((replace(first, **change), second)).digest != whole
    assert Manifest((second, first)).digest != whole


def test_later_fields_leave_old_digests_alone(tmp_path):
    """Top-k, top-p and the accept rule are written only where they say something."""
    plain = ManifestEntry("a", (1, 2), 8, 1.0, 3, 1)
    assert Manifest((replace(plain, top_k=0, top_p=1, accept_rule="match"),)).digest == Manifest((plain,)).digest
    for change in ({"top_k": 5}, {"top_p": 0.9}, {"accept_rule": "rejection"}, {"top_k": np.int64(5), "top_p": 0.5}):
        entry = replace(plain, **change)
        manifest = Manifest((plain, entry))
        path = manifest.save(tmp_path / "m.jsonl")
        old, new = (json.loads(line) for line in path.read_text().splitlines())
        assert new == old | change and len(new) == len(old) + len(change)
        again = Manifest.load(path)
        assert again == manifest and again.digest == manifest.digest != Manifest((plain, plain)).digest
        assert all(getattr(entry.sampling, name) == value for name, value in change.items())
    built = Manifest.build(PROMPTS, 2, 9, 0.5, top_k=4, top_p=0.8, accept_rule="rejection")
    assert {(e.top_k, e.top_p, e.accept_rule) for e in built} == {(4, 0.8, "rejection")}
    assert Manifest.build(PROMPTS, 2, 9, 0.5).entries[0].sampling.accept_rule == "match"


def test_outputs_that_can_be_compared():
    manifest = Manifest.build(PROMPTS, 3, 9, 0.5)
    assert manifest.fixed_outputs and not manifest.greedy
    loose = Manifest.build(PROMPTS, 3, 9, 0.5, top_k=4, accept_rule="rejection")
    assert not loose.fixed_outputs and not Manifest((*manifest, *loose)).fixed_outputs
    assert Manifest.build(PROMPTS, 3, 9, accept_rule="rejection").fixed_outputs, "greedy requests draw nothing"
    assert loose.greedy_prompts(9).digest == manifest.greedy_prompts(9).digest


def test_greedy_prompts_hold_each_prompt_once():
    manifest = Manifest.build(PROMPTS | {"same": [4]}, 9, 6, temperature=0.7)
    short = manifest.greedy_prompts(4)
    assert [entry.id for entry in short] == ["a", "b", "c"]
    assert short.greedy and {entry.max_new_tokens for entry in short} == {4}
    assert {entry.max_new_tokens for entry in manifest.greedy_prompts(50)} == {6}


GOOD = {"id": "a", "prompt_ids": (1,), "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "id=''"),
        ({"id": 3}, "id=3"),
        ({"prompt_ids": ()}, "prompt_ids=.*at least one"),
        ({"prompt_ids": (1, -1)}, "none below 0"),
        ({"prompt_ids": (1, 2.5)}, "prompt_ids holds 2.5"),
        ({"prompt_ids": (True,)}, "prompt_ids holds True"),
        ({"prompt_ids": "12"}, "prompt_ids='12'"),
        ({"prompt_ids": 12}, "prompt_ids=12"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"repetition": -1}, "repetition=-1"),
        ({"repetition": 0.5}, "repetition holds 0.5"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"accept_rule": "guess"}, "accept_rule='guess'; allowed: match, rejection"),
    ],
)
def test_bad_entries_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ManifestEntry(**(GOOD | change))


def test_bad_manifests_are_refused():
    with pytest.raises(ValueError, match="entries is empty"):
        Manifest(())
    with pytest.raises(ValueError, match="0 prompts"):
        Manifest.build({}, 4, 4)
    with pytest.raises(ValueError, match="num_requests=0"):
        Manifest.build(PROMPTS, 0, 4)
    with pytest.raises(ValueError, match=r"num_requests holds 2\.0"):
        Manifest.build(PROMPTS, 2.0, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        ("{", "line 2: "),
        ("[1]", "line 2: a request has the fields id, .* found list"),
        ('{"id": "a"}', r"line 2: a request has the fields .* found \['id'\]"),
        (json.dumps({**GOOD, "temperature": 0.0, "seed": 0, "repetition": 0, "extra": 1}), "line 2: .*extra"),
        (json.dumps({**GOOD, "temperature": 0.0, "seed": -3, "repetition": 0}), "line 2: seed=-3"),
        (json.dumps({**GOOD, "prompt_ids": None, "temperature": 0.0, "seed": 3, "repetition": 0}), "prompt_ids=None"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + text + "\n")
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        Manifest.load(path)
