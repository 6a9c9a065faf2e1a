"""The GPU clock, on a stand-in for the GPU that records what it is asked to do."""

import types

import pytest
import torch

from keysift.benchmarks import harness


@pytest.fixture
def fake_gpu(monkeypatch):
    """A `torch` for the harness whose GPU runs at once, on a clock of its own; `log` is what ran, in order."""
    log, now, capturing = [], [0.0], []

    class Graph:
        def capture_begin(self):
            self.work = []
            capturing.append(self.work)

        def capture_end(self):
            capturing.pop()

        def replay(self):
            for work in self.work:
                work()

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = now[0]

        def elapsed_time(self, stop):
            return (stop.at - self.at) / 1e3

    class Foreign:
        def add_(self, one):
            log.append("foreign")
            now[0] += 999.0

    def launch(name, us):
        def work(i):
            def run():
                log.append(f"{name}{i}")
                now[0] += us

            (capturing[-1].append if capturing else lambda work: work())(run)

        return work

    cuda = types.SimpleNamespace(
        CUDAGraph=Graph,
        Event=Event,
        Stream=lambda device: None,
        synchronize=lambda device: None,
        empty_cache=lambda: None,
    )
    zeros = lambda *shape, **options: Foreign()  # noqa: E731
    monkeypatch.setattr(harness, "torch", types.SimpleNamespace(cuda=cuda, zeros=zeros, int32=torch.int32))
    return log, launch


def test_the_gpu_clock_rotates_inputs_and_flushes_outside_the_timed_region(fake_gpu):
    log, launch = fake_gpu
    clock = harness.GpuClock("cuda:0", "cold", 0.0)
    clock.use(3, 1000, None)
    assert clock.inputs == 3
    a, b = harness.Variant("a", launch("a", 5.0)), harness.Variant("b", launch("b", 7.0))
    clock.replay(a)
    del log[:]
    times = clock.measure([a, b])
    assert (times["a"].us, times["b"].us) == (5.0, 7.0)
    assert (times["a"].launches, times["a"].rounds) == (20, 7)
    one_round = ["foreign", *[f"a{i % 3}" for i in range(20)], "foreign", *[f"b{i % 3}" for i in range(20)]]
    assert log[-len(one_round) :] == one_round
    clock.use(3, int(9e9), None)
    clock.forget()
    assert clock.measure([a])["a"].launches == 2


def test_the_gpu_clock_warm_repeats_one_input(fake_gpu):
    log, launch = fake_gpu
    clock = harness.GpuClock("cuda:0", "warm", 0.0)
    clock.use(3, 1000, None)
    assert clock.measure([harness.Variant("a", launch("a", 5.0))])["a"].us == 5.0
    assert set(log) == {"a0"}


def test_the_gpu_clock_takes_the_copies_off_in_producer_mode(fake_gpu):
    log, launch = fake_gpu
    clock = harness.GpuClock("cuda:0", "producer", 0.0)
    clock.use(3, 1000, launch("copy", 11.0))
    variants = [harness.Variant("a", launch("a", 5.0)), harness.Variant("b", launch("b", 7.0))]
    times = clock.measure(variants)
    assert list(times) == ["a", "b"]
    assert (times["a"].us, times["b"].us, times["a"].launches) == (5.0, 7.0, 10)
    assert log[log.index("a1") - 1] == "copy1"


def test_a_capture_that_fails_ends_and_raises_its_own_error(fake_gpu):
    _, launch = fake_gpu
    clock = harness.GpuClock("cuda:0", "cold", 0.0)
    clock.use(2, 1000, None)

    def fails_on_the_second(i):
        if i == 1:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        clock.replay(harness.Variant("bad", fails_on_the_second))
    good = harness.Variant("good", launch("good", 1.0))
    assert clock.measure([good])["good"].us == 1.0
