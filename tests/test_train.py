"""What the training loop promises: it learns, resumes bitwise, follows steps or the clock, and refuses nonsense."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from train_setup import CONFIG, Setup

from workbench.train.checkpoint import read_checkpoint, write_checkpoint
from workbench.train.dart_objective import DartLoss
from workbench.train.schedule import TrainConfig
from workbench.train.trainer import Trainer


def test_training_learns_one_batch():
    setup = Setup()

    class OneBatch:
        def batch(self, step):
            return setup.batches.batch(0)

    config = TrainConfig(steps=150, warmup_steps=10, learning_rate=1e-2, log_every=50)
    records = Trainer(setup.objective, OneBatch(), config).run()
    assert [r["step"] for r in records] == [50, 100, 150]
    assert records[-1]["loss"] < 0.2 * records[0]["loss"]
    assert len(records[0]["kl"]) == CONFIG.depth and records[-1]["agree"][0] > 0.75


def test_resume_is_bitwise(tmp_path):
    config = TrainConfig(steps=6, warmup_steps=2, log_every=4, ema_decay=0.9)
    straight = Setup()
    whole = Trainer(straight.objective, straight.batches, config)
    whole.run()
    first = Setup()
    Trainer(first.objective, first.batches, config).run(until=3, checkpoint=tmp_path / "run" / "state.safetensors")
    second = Setup()
    with torch.no_grad():
        second.draft.fc.weight.zero_()  # whatever the fresh module holds, the checkpoint decides
    resumed = Trainer(second.objective, second.batches, config)
    resumed.load(tmp_path / "run" / "state.safetensors")
    assert (resumed.step, len(resumed.records)) == (3, 0)
    resumed.run()
    for (name, one), two in zip(straight.draft.named_parameters(), second.draft.parameters(), strict=True):
        assert torch.equal(one, two), name
    times = {"seconds"}
    strip = [[{k: v for k, v in r.items() if k not in times} for r in t.records] for t in (whole, resumed)]
    assert strip[0] == strip[1] and [r["step"] for r in strip[0]] == [4, 6]
    with whole.averaged(), resumed.averaged():
        assert torch.equal(straight.draft.fc.weight, second.draft.fc.weight)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["state.safetensors"]


def test_checkpoints_of_another_run_are_refused(tmp_path):
    setup = Setup()
    trainer = Trainer(setup.objective, setup.batches, TrainConfig(steps=6))
    trainer.save(tmp_path / "state")
    other = Trainer(setup.objective, setup.batches, TrainConfig(steps=6, learning_rate=1e-3))
    with pytest.raises(ValueError, match="another learning_rate"):
        other.load(tmp_path / "state")

    class Toy:
        module = nn.Linear(2, 2)
        identity = setup.objective.identity

    with pytest.raises(ValueError, match="parameters of another module"):
        Trainer(Toy(), setup.batches, TrainConfig(steps=6)).load(tmp_path / "state")
    for objective, batches, words in (
        (Setup(loss=DartLoss(gamma=0.9)).objective, setup.batches, "another objective"),
        (setup.objective, Setup(num_blocks=4).batches, "another batches"),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(objective, batches, TrainConfig(steps=6)).load(tmp_path / "state")
    tensors, state = read_checkpoint(tmp_path / "state")
    held = [p.clone() for p in setup.objective.module.parameters()]
    for drop_tensor, drop_state in (("random.cpu", ""), ("", "step")):
        fewer = {n: t for n, t in tensors.items() if n != drop_tensor}
        write_checkpoint(tmp_path / "cut", fewer, {n: v for n, v in state.items() if n != drop_state})
        with pytest.raises(ValueError, match=f"damaged: {drop_tensor or drop_state}"):
            trainer.load(tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(held, setup.objective.module.parameters(), strict=True))
    (tmp_path / "state").write_bytes(b"{}")
    for name in ("state", "absent"):
        with pytest.raises(ValueError, match="no readable checkpoint"):
            trainer.load(tmp_path / name)


def test_a_run_by_the_clock_ends_and_its_rate_follows_the_time():
    setup = Setup()
    config = TrainConfig(seconds=0.3, warmup_steps=1, log_every=1)
    records = Trainer(setup.objective, setup.batches, config).run()
    assert records[-1]["seconds"] >= 0.3 and len(records) > 1
    rates = [r["learning_rate"] for r in records]
    assert rates == sorted(rates, reverse=True) and rates[-1] < rates[0]


def test_schedule():
    config = TrainConfig(steps=100, learning_rate=1.0, warmup_steps=10)
    assert config.rate(0, 0.0) == pytest.approx(0.1) and config.rate(9, 0.0) == pytest.approx(1.0)
    assert config.rate(50, 0.5) == pytest.approx(0.5) and config.rate(99, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, "exactly one"),
        ({"steps": 1, "seconds": 1.0}, "exactly one"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1, "learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"steps": 1, "ema_decay": 1.0}, "ema_decay=1.0"),
        ({"steps": 1, "betas": (0.9, 1.0)}, "betas"),
        ({"steps": 1, "clip_norm": 0.0}, "clip_norm=0.0"),
    ],
)
def test_bad_settings_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**fields)


def test_a_loss_that_explodes_stops_the_run():
    class Exploding:
        module = nn.Linear(1, 1)
        identity = "exploding"

        def loss(self, batch):
            return self.module.weight.sum() * float("inf"), {}

    class Nothing:
        identity = "nothing"

        def batch(self, step):
            return None

    with pytest.raises(FloatingPointError, match="loss is"):
        Trainer(Exploding(), Nothing(), TrainConfig(steps=4, log_every=2)).run()
