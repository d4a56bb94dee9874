"""The timer on a CUDA device: events on the stream, read with one wait. Its CPU side is in test_measure.py."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from workbench.measure.stream_marks import StreamMarks
from workbench.measure.timer import StageTimer


class FakeStream:
    """A stream whose clock is set by hand; events are placed at the time when it comes to them."""

    def __init__(self) -> None:
        self.now_ms, self.waits, self.made = 0.0, 0, 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent()


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms = stream, stream.now_ms

    def synchronize(self) -> None:
        self.stream.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture
def timer(stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> StageTimer:
    """A timer of a CUDA device whose stream is a fake."""
    marks = StreamMarks(lambda: stream, stream.event)
    monkeypatch.setattr(StreamMarks, "of_device", classmethod(lambda cls, device: marks))
    return StageTimer("cuda:0")


def test_nested_stages_are_exclusive_and_gaps_are_nobodys(timer, stream):
    with timer.stage("verify"):
        stream.now_ms += 10
        with timer.stage("accept"):
            stream.now_ms += 3
            with timer.stage("verify"):
                stream.now_ms += 20
            stream.now_ms += 4
        stream.now_ms += 30
    stream.now_ms += 500
    with timer.stage("commit"):
        stream.now_ms += 1
    stream.now_ms += 500
    assert stream.waits == 0, "stages wait for nothing"
    assert timer.take() == pytest.approx({"verify": 0.060, "accept": 0.007, "commit": 0.001})
    assert stream.waits == 1


def test_taken_stages_do_not_come_back_and_events_are_used_again(timer, stream):
    for _ in range(5):
        for name in ("draft", "verify"):
            with timer.stage(name):
                stream.now_ms += 2
        assert timer.take() == pytest.approx({"draft": 0.002, "verify": 0.002})
        stream.now_ms += 7
    assert timer.take() == {}
    assert stream.made == 4


def test_seconds_can_be_read_in_between(timer, stream):
    with timer.stage("draft"):
        stream.now_ms += 2
        assert timer.seconds == {}, "the running stage is counted when it ends"
        stream.now_ms += 2
    assert timer.seconds == pytest.approx({"draft": 0.004})
    with timer.stage("draft"):
        stream.now_ms += 1
    assert timer.seconds == pytest.approx({"draft": 0.005})
    assert timer.take() == pytest.approx({"draft": 0.005})


def test_reset_forgets_and_open_stages_go_on_from_there(timer, stream):
    with timer.stage("draft"):
        stream.now_ms += 1
    with timer.stage("verify"):
        stream.now_ms += 8
        timer.reset()
        stream.now_ms += 2
        with timer.stage("pack"):
            stream.now_ms += 3
    assert timer.take() == pytest.approx({"verify": 0.002, "pack": 0.003})
    assert stream.waits == 1


def test_errors_end_their_stage(timer, stream):
    with pytest.raises(KeyError), timer.stage("pack"), timer.stage("draft"):
        stream.now_ms += 1
        raise KeyError
    with timer.stage("pack"):
        stream.now_ms += 2
    assert timer.take() == pytest.approx({"draft": 0.001, "pack": 0.002})
    with pytest.raises(ValueError, match="stage='prune' is unknown"):
        timer.stage("prune")


def test_without_a_gpu_the_timer_needs_no_torch():
    code = "import sys; from workbench.measure.timer import StageTimer; StageTimer(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_stages_sum_to_what_passed_on_the_stream():
    timer = StageTimer("cuda")
    a = torch.randn(8192, 8192, device="cuda")
    a @ a  # the first product also sets up cuBLAS
    for _ in range(2):  # the first turn makes the events
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with timer.stage("draft"):
            a @ a
        with timer.stage("verify"):
            for _ in range(20):
                a @ a
            queued = time.perf_counter() - begin
            with timer.stage("accept"):
                torch.cuda.synchronize()
                time.sleep(0.05)
        taken = timer.take()
        whole = time.perf_counter() - begin
    assert queued < 0.5 * whole, "nothing may wait while stages begin and end"
    assert taken["verify"] > 5 * taken["draft"] > 0
    assert 0.05 <= taken["accept"] < 0.1, "host work while the device idles counts, and only once"
    assert sum(taken.values()) == pytest.approx(whole, rel=0.05)


@pytest.mark.gpu
def test_stages_follow_the_current_stream():
    timer, side = StageTimer("cuda"), torch.cuda.Stream()
    a = torch.randn(8192, 8192, device="cuda")
    a @ a
    torch.cuda.synchronize()
    with torch.cuda.stream(side), timer.stage("verify"):
        for _ in range(10):
            a @ a
    assert timer.take()["verify"] > 1e-3
