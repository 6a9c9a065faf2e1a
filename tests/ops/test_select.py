"""select, each kernel by name, against the contract."""

import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import keysift
from keysift.ops.select import reference
from keysift.testing import check_select, lines, select_kernels
from keysift.testing.calls import build
from keysift.testing.cases import DTYPES, EXTREMES, Case, Layout, Pages
from keysift.testing.checks import oracle
from keysift.testing.inputs import DISTRIBUTIONS

KERNELS = [name for name, selector in select_kernels("cpu") if callable(selector)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report():
    """The kit's judgement of a kernel, made once."""
    made = {}

    def of(kernel):
        if kernel not in made:
            made[kernel] = check_select(dict(select_kernels("cpu"))[kernel], tier="cpu")
        return made[kernel]

    return of


@pytest.mark.parametrize("line", lines.LINES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_contract_is_kept(kernel, line, report):
    judged = report(kernel).lines[line]
    assert judged.verdict == "passed", judged.first_failure or judged.verdict


def test_the_fastest_kernel_is_the_default():
    """What a plain call runs is what was judged, not another path."""
    call = build(Case(3, 5000, 600, "relu"), CPU, 1)
    assert torch.equal(keysift.select(call.scores, 600), keysift.select(call.scores, 600, kernel=KERNELS[0]))


bounds = st.none() | st.lists(st.integers(-20, 500) | st.sampled_from(EXTREMES), min_size=1, max_size=4).map(tuple)


@st.composite
def drawn_cases(draw):
    """Any shape, window, dtype and distribution; the largest sizes are past what one vector or one block holds."""
    columns = draw(st.integers(0, 400) | st.sampled_from([1023, 1024, 1025, 2049]))
    return Case(
        draw(st.integers(0, 5)),
        columns,
        draw(st.integers(1, 90) | st.just(columns + 1)),
        draw(st.sampled_from(sorted(DISTRIBUTIONS))),
        draw(st.sampled_from(DTYPES)),
        start=draw(bounds),
        end=draw(bounds),
        bounds_dtype=torch.int64,
        bounds_stride=draw(st.integers(1, 2)),
        layout=Layout(draw(st.integers(0, 9)), draw(st.integers(0, 5))),
        base=draw(st.sampled_from(["window", "column"])),
        pages=None,
    )


@given(
    case=drawn_cases(), seed=st.integers(0, 2**31), paged=st.none() | st.tuples(st.integers(1, 70), st.integers(0, 9))
)
@settings(max_examples=100)
def test_every_kernel_gives_the_same_bits(case, seed, paged):
    """Sorted, so that the order is one too: indices, values and counts of every kernel are those of the reference."""
    call = build(case, CPU, seed)
    options = call.options() | {"sorted": True, "return_values": True, "return_counts": True}
    if paged is not None and "index_base" not in options:
        size, pages = paged
        options |= {"page_table": torch.randint(-1, 1000, (case.rows, pages)), "page_size": size}
    wanted = keysift.select(call.scores, case.k, kernel="reference", **options)
    for kernel in KERNELS:
        given = keysift.select(call.scores, case.k, kernel=kernel, **options)
        for one, other in zip(given, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), f"{kernel}, {case}, seed {seed}"


@given(case=drawn_cases(), seed=st.integers(0, 2**31))
@settings(max_examples=100)
def test_the_reference_means_what_the_oracle_means(case, seed):
    call = build(case, CPU, seed)
    options = call.options() | {"sorted": True, "return_counts": True, "index_base": "column"}
    indices, counts = keysift.select(call.scores, case.k, kernel="reference", **options)
    columns, found = oracle(call.scores, case.k, call.lower, call.upper)
    assert torch.equal(indices.long(), columns.where(columns < case.columns, -1)), f"{case}, seed {seed}"
    assert torch.equal(counts.long(), found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_equivalent_to_what_the_docstrings_say(kernel):
    """The lines after "Equivalent to" of select, select_prefill and select_decode."""
    scores = torch.randn(6, 300)
    same = keysift.select(scores, 40, kernel=kernel).sort(1).values
    assert torch.equal(same, scores.topk(40).indices.int().sort(1).values)
    starts, ends = torch.tensor([0, 5, 10, 0, 0, 299]), torch.tensor([300, 90, 10, 1, 39, 300])
    same = keysift.select_prefill(scores, 40, starts, ends, kernel=kernel)
    assert torch.equal(same, keysift.select(scores, 40, start=starts, end=ends, kernel=kernel))
    lens, next_n = torch.tensor([300, 2]), 3
    ends = lens[:, None] - next_n + 1 + torch.arange(next_n)
    same = keysift.select_decode(scores, 40, lens, next_n, kernel=kernel)
    assert torch.equal(same, keysift.select(scores, 40, end=ends.flatten(), kernel=kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_is_what_is_returned(kernel):
    scores = torch.randn(3, 200)
    out, values, counts = torch.empty(5, 20, dtype=torch.int32), torch.empty(3, 20), torch.empty(4, dtype=torch.int32)
    assert keysift.select(scores, 20, out=out, kernel=kernel).data_ptr() == out.data_ptr()
    returned = keysift.select(
        scores, 20, out=(out, values, counts), return_values=True, return_counts=True, kernel=kernel
    )
    assert [tensor.data_ptr() for tensor in returned] == [tensor.data_ptr() for tensor in (out, values, counts)]
    assert [tuple(tensor.shape) for tensor in returned] == [(3, 20), (3, 20), (3,)]
    lens = torch.tensor([200, 7, 100])
    assert keysift.select_decode(scores, 20, lens, 1, out, kernel=kernel).data_ptr() == out.data_ptr()
    assert keysift.select_prefill(scores, 20, lens - 7, lens, out, kernel=kernel).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_number_of_threads_changes_nothing(kernel, rows):
    call = build(Case(rows, 150000, 2048, "relu"), CPU, 2)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(keysift.select(call.scores, 2048, kernel=kernel))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_callers_do_not_disturb_one_another(kernel):
    calls = [build(Case(4, 20000 + 1000 * seed, 500, "relu"), CPU, seed) for seed in range(4)]
    wanted = [keysift.select(call.scores, 500, kernel=kernel) for call in calls]

    def work(call):
        return [keysift.select(call.scores, 500, kernel=kernel) for _ in range(10)]

    with ThreadPoolExecutor(len(calls)) as pool:
        for results, right in zip(pool.map(work, calls), wanted, strict=True):
            assert all(torch.equal(result, right) for result in results)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_allocated_with_out_and_workspace(rows, dtype):
    """torch's profiler sees what torch allocates, tracemalloc what numpy and Python do: a call's objects, no more."""
    scores = torch.randn(rows, 65536).to(dtype)
    k, out = 2048, torch.empty(rows, 2048, dtype=torch.int32)
    workspace = torch.empty(keysift.select_workspace_size(scores, k, kernel="cpu"), dtype=torch.uint8)
    lens = torch.full((rows,), 65536)

    def call():
        keysift.select_decode(scores, k, lens, 1, out, workspace=workspace, kernel="cpu")

    def allocations(function):
        function()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
        return [event.name for event in profile.events() if event.name == "[memory]" or event.cpu_memory_usage > 0]

    assert allocations(lambda: keysift.select(scores, k, kernel="cpu")), "the profiler sees none"
    assert allocations(call) == []
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 16384, "more than the call's own Python objects"


def test_the_workspace_does_not_grow_with_the_columns():
    sizes = [keysift.select_workspace_size(torch.empty(1, 1).expand(64, columns), 512) for columns in (2**16, 2**20)]
    assert sizes[1] <= 2 * sizes[0]


def test_rows_in_chunks_give_what_all_at_once_give(monkeypatch):
    call = build(Case(30, 700, 64, "relu", start="random", end="random", pages=Pages(16)), CPU, 3)
    wanted = keysift.select(call.scores, 64, kernel="reference", **call.options())
    monkeypatch.setattr(reference, "CELLS", 2000)
    assert torch.equal(wanted, keysift.select(call.scores, 64, kernel="reference", **call.options()))


def operator_arguments(form):
    """Arguments of torch.ops.keysift.select."""
    call = build(Case(4, 300, 40, "relu", start="random", end="random", pages=Pages(16)), CPU, 4)
    out = torch.empty(5, 40, dtype=torch.int32)
    if form == "plain":
        return call.scores, 40, None, None, 1, None, None, 0, "window", False, out, None, None, None, None
    values, counts, workspace = (
        torch.empty(4, 40),
        torch.empty(4, dtype=torch.int32),
        torch.empty(2**20, dtype=torch.uint8),
    )
    return (
        call.scores, 40, call.start, call.end, 1, call.page_table, None, 16, "window", True,
        out, values, counts, workspace, "reference",
    )  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "full"])
def test_opcheck(form):
    torch.library.opcheck(torch.ops.keysift.select.default, operator_arguments(form))


def forms():
    """Every public form, as a function of scores and lengths."""

    def allocating(scores, lens):
        return keysift.select(scores, 30, end=lens) + 1

    def everything(scores, lens):
        return keysift.select(
            scores,
            30,
            end=lens,
            sorted=True,
            return_values=True,
            return_counts=True,
            index_base="column",
        )

    def decode(scores, lens):
        return keysift.select_decode(scores * 2, 30, lens[: scores.shape[0] // 2], 2)

    def prefill(scores, lens):
        out = torch.empty(scores.shape[0] + 1, 30, dtype=torch.int32)
        out[-1] = 7
        keysift.select_prefill(scores, 30, lens - 20, lens, out)
        return out

    def paged(scores, lens):
        table = torch.arange(10, device=scores.device).expand(scores.shape[0], 10)
        return keysift.select(scores, 30, end=lens, page_table=table, page_size=16)

    return allocating, everything, decode, prefill, paged


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", range(5))
def test_compile_without_a_graph_break(form, dynamic):
    function = forms()[form]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, columns in ((4, 200), (4, 200), (6, 333)):
        scores, lens = torch.randn(rows, columns), torch.randint(0, columns + 9, (rows,))
        given, wanted = compiled(scores, lens), function(scores, lens)
        for one, other in zip(given, wanted, strict=True):
            assert torch.equal(one, other)


def test_refusals_hold_under_optimised_python():
    """`python -O` drops assertions; what is refused is refused all the same."""
    code = """
from keysift.testing import check_select, lines, select_kernels
for name, selector in select_kernels("cpu"):
    if not callable(selector):
        continue
    report = check_select(selector, accepts=lambda case: False, tier="tiny")
    line = report.lines[lines.REFUSED]
    if __debug__ or line.failed or line.passed < 60:
        raise SystemExit(f"{name}\\n{report}")
"""
    subprocess.run([sys.executable, "-O", "-c", code], check=True)


#: Calls that KEYSIFT_CHECK=1 refuses, and what their refusals name.
CHECKED = {
    "keysift.select(scores, 5, start=torch.tensor([0, 50, 51, -1]), out=out)": "start[2] is 51",
    "keysift.select(scores, 5, end=torch.tensor([50, -7, 60, 0]), out=out)": "end[1] is -7",
    "keysift.select(scores, 5, start=four + 5, end=four + torch.tensor([5, 6, 7, 1]), out=out)": "end[3] is 4",
    "keysift.select_prefill(scores, 5, four - 1, four, out)": "row_starts[0] is -1",
    "keysift.select_prefill(scores, 5, four, four + 48, out)": "row_ends[3] is 51",
    "keysift.select_decode(scores, 5, torch.tensor([50, 51]), 2, out)": "seq_lens[1] is 51",
    "keysift.select_decode(scores, 5, torch.tensor([[1, 2], [3, 51]]), 2, out)": "seq_lens[1, 1] is 51",
    "keysift.select(scores, 5, page_table=table, page_size=8, page_rows=four + 2, out=out)": "page_rows[2] is 4",
    "keysift.select(scores, 5, page_table=hole, page_size=8, out=out)": "page_table[3, 1] is -5",
    "keysift.select(scores, 5, page_table=table + 2**28, page_size=8, out=out)": "page_table[0, 0] is 268435456",
}

#: One process for all of them, since the variable is read once; prints what each call raises and whether it wrote.
PROCESS = """
import sys, torch, keysift
scores, four = torch.randn(4, 50), torch.tensor([0, 1, 2, 3])
table = four[:, None] + 4 * torch.arange(7)
hole = table.clone()
hole[3, 1] = -5
for call in sys.argv[1:]:
    out = torch.full((4, 5), 0x7F7F7F7F, dtype=torch.int32)
    try:
        exec(call)
        print("accepted")
    except ValueError as error:
        print(error, "| written:", bool((out != 0x7F7F7F7F).any()))
keysift.select(scores, 5, start=four, end=four + 46)
keysift.select_decode(scores, 5, torch.tensor([50, 1]), 2)
table[:, 2:] = -1
keysift.select(scores, 5, end=four + 13, page_table=table, page_size=8, page_rows=3 - four)
keysift.select(scores, 5, end=four * 0, page_table=table[:, :0], page_size=8)
print("right values pass")
"""


def test_keysift_check_names_the_first_bad_row():
    command = [sys.executable, "-c", PROCESS, *CHECKED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "KEYSIFT_CHECK": "1"})
    *refused, passed = run.stdout.splitlines()
    assert passed == "right values pass"
    for words, line in zip(CHECKED.values(), refused, strict=True):
        assert words in line
        assert line.endswith("| written: False")


class Log(TorchDispatchMode):
    """The operators that a dispatch mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_operator():
    """A call that nobody watches does not go through torch's dispatcher; modes, profilers and fakes find it there."""
    scores = torch.randn(2, 50)
    with Log() as log:
        watched = keysift.select(scores, 3, sorted=True)
    assert "keysift.select.default" in log.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = keysift.select(scores, 3, sorted=True)
    assert "keysift::select" in {event.name for event in profile.events()}
    with FakeTensorMode() as mode:
        fake = keysift.select(mode.from_tensor(scores), 3, sorted=True)
    assert type(fake).__name__ == "FakeTensor"
    for found in (watched, profiled, keysift.select(torch.nn.Parameter(scores), 3, sorted=True)):
        assert torch.equal(found, keysift.select(scores, 3, sorted=True))
