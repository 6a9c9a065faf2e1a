"""The benchmark on a GPU: graphs, floor kernels, modes."""

import pytest
import torch

from keysift.benchmarks import bench_score, bench_select, bench_sparse_mla, floor, harness
from keysift.benchmarks.cases import Case

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("mode", harness.MODES)
@pytest.mark.parametrize(
    "case",
    [
        Case("decode", 3, 5003, 64),  # rows that begin at every alignment
        Case("decode", 70, 8192, 300, "nan1", "bfloat16"),
        Case("prefill", 130, 1000, 2048, "relu", "float16"),
    ],
)
def test_everything_timed_was_checked(gpu, case, mode):
    entry = bench_select.run([case], gpu, mode=mode, seconds=0.05)[case.name]
    assert bench_select.faults(entry) == []
    for time in [*entry["kernels"].values(), entry["others"]["fallback"], entry["floor"]]:
        assert time["checked"] is True
        assert time["launches"] == (harness.PAIRS if mode == "producer" else harness.GRAPH_LAUNCHES)
        assert time["us"] > 0


def test_a_cold_floor_is_what_the_memory_can_do(gpu):
    """256 MiB a launch, in a range that holds every card: neither skipped nor read at the speed of a CPU."""
    case = Case("decode", 64, 1 << 20)
    entry = bench_select.run([case], gpu, kernels=["reference"], seconds=0.1)[case.name]
    assert 100 < entry["floor"]["gbps"] < 20_000


def test_ways_to_read_are_tried_in_several_shapes(gpu):
    clock = harness.GpuClock(gpu, "cold", 0.05)
    with clock.stream():
        case = Case("decode", 16, 16384)
        ways = floor.ways_to_read([case.scores(gpu, 0)], case.ends(gpu))
        clock.use(1, 16 * 16384 * 4, None)
        assert floor.fastest(clock, ways) in ways
        assert len(ways) > 1 or torch.version.hip


@pytest.mark.parametrize(
    "case",
    [
        bench_sparse_mla.Case("decode", 3, 1024, 64, 256),
        bench_sparse_mla.Case("decode", 2, 1024, 16, 100, "bfloat16"),
        bench_sparse_mla.Case("prefill", 5, 1024, 128, 256, "bfloat16"),
    ],
)
def test_all_that_sparse_mla_is_timed_beside_is_right(gpu, case):
    entry = bench_sparse_mla.run([case], gpu, seconds=0.05)[case.name]
    for time in [*entry["kernels"].values(), *entry["others"].values()]:
        assert time["checked"], time
        assert time["us"] > 0


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_all_that_score_is_timed_beside_is_right(gpu, phase):
    case = bench_score.Case(phase, 3, 1000)
    entry = bench_score.run([case], gpu, seconds=0.05)[case.name]
    for time in [*entry["kernels"].values(), *entry["others"].values()]:
        assert time["checked"], time
