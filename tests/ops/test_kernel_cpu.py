"""The numba kernel of select: that each of its ways through a row is taken, and means the same as the reference."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit

import keysift
from keysift import dispatch
from keysift.ops.select import kernel_cpu as kernel
from keysift.ops.select import kernel_cpu_code as code
from keysift.ops.select import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
K = 500


@njit
def cut_of(scores, k, infinity, capacity):
    ranks, spare, histogram = np.empty(capacity, np.uint32), np.empty(capacity, np.uint32), np.empty(2048, np.uint32)
    return code._cut(scores, np.int64(0), len(scores), k, 1, infinity, ranks, spare, histogram)


@njit
def beaten(scores, cut, infinity):
    count = 0
    for score in scores:
        count += code._rank(score, infinity) < cut
    return count


def way(row, k=K):
    """Which way the kernel goes through a row [N]: no cut, enough beat it, too few, too many, or crowded equals."""
    bits = row.view(torch.int32 if row.element_size() == 4 else torch.int16).numpy()
    bits, infinity = bits.view(f"uint{8 * row.element_size()}"), np.uint32(kernel.INFINITY[row.dtype])
    capacity = kernel._plan(1, len(row), k)[2]
    cut, room = cut_of(bits, k, infinity, capacity)
    if cut == 2 * int(infinity):
        return "whole"
    found = beaten(bits, np.uint32(cut), infinity)
    if found < k:
        return "few"
    if found > capacity - 64:
        return "crowded" if room == k else "many"
    return "enough"


def runs(seed, dtype, length=8):
    """A row in which neighbours are equal, so that a sample of a few hundred knows little about it."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20000 // length, generator=generator)
    fine = torch.rand(values.numel() * length, generator=generator) if dtype == torch.float32 else 0.0
    return (values.repeat_interleave(length) + 1e-3 * fine).to(dtype)


def rows_by_way(dtype):
    """One row [20000] for each way."""
    rows = {"enough": torch.randn(20000).to(dtype), "crowded": torch.full((20000,), -2.5, dtype=dtype)}
    rows["whole"] = torch.full((20000,), float("nan"), dtype=dtype)
    rows["whole"][::500] = 1.0
    for seed in range(400):
        row = runs(seed, dtype)
        rows.setdefault(way(row), row)
    return rows


def selected(scores, k, run=kernel.run, **given):
    """(indices, values, counts) on poisoned outputs, and a poisoned workspace of exactly the size that is asked for."""
    rows, columns = scores.shape
    size = kernel.workspace_size(rows, columns, k)
    workspace = torch.full((size + 8,), 0x7F, dtype=torch.uint8)
    out = torch.full((rows, k), 0x7F7F7F7F, dtype=torch.int32)
    values, counts = torch.full((rows, k), 7.0, dtype=scores.dtype), torch.full((rows,), -7, dtype=torch.int32)
    arguments = {"start": None, "end": None, "next_n": 1} | given
    start, end, next_n = arguments["start"], arguments["end"], arguments["next_n"]
    run(scores, k, start, end, next_n, None, None, 0, "window", True, out, values, counts, workspace[:size])
    assert (workspace[size:] == 0x7F).all(), "the workspace was overrun"
    return out, values, counts


def check(scores, k, **given):
    for ours, meant in zip(selected(scores, k, **given), selected(scores, k, reference.run, **given), strict=True):
        assert torch.equal(ours, meant)


@pytest.fixture
def threads():
    """Sets torch's threads, and puts them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch):
    """Short rows are shared out and cut up as long ones are."""
    monkeypatch.setattr(kernel, "SERIAL", 0)
    monkeypatch.setattr(kernel, "PIECE", 512)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_through_a_row_is_taken_and_exact(dtype):
    rows = rows_by_way(dtype)
    assert set(rows) == {"whole", "enough", "few", "many", "crowded"}
    for name, row in rows.items():
        assert way(row) == name
        check(row[None], K)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_pieces_of_a_row_make_the_same_row(dtype, count, threads, small_pieces):
    for row in rows_by_way(dtype).values():
        threads(count)
        assert kernel._plan(1, 20000, K) == (count, count, kernel._plan(1, 20000, K)[2])
        check(row[None], K)
        check(row[None], K, start=torch.tensor([17]), end=torch.tensor([17 + count]))
        check(row.view(2, -1), 2 * K)


@pytest.mark.parametrize("rows", [2, 3, 64, 257])
def test_rows_are_shared_out_whatever_their_lengths(rows, threads, small_pieces):
    threads(3)
    scores = torch.randn(rows, 700)
    assert kernel._plan(rows, 700, 90)[:2] == (min(rows, 3), 1)
    check(scores, 90, end=torch.arange(rows) * 700 // rows)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_end_anywhere_in_a_block(dtype, columns):
    scores = torch.randn(3, columns + 5).to(dtype)[:, 2 : 2 + columns]
    for k in {1, 5, columns // 2 + 1, columns, columns + 1}:
        check(scores, k)


def test_samples_do_not_fall_in_step_with_a_period():
    period = torch.arange(65536).remainder(64).div(64)
    assert way(period, 512) in ("enough", "crowded")
    check(period[None], 1024)


def test_a_workspace_that_is_one_byte_short_is_refused():
    scores, out = torch.randn(5, 3000), torch.full((5, 300), 7, dtype=torch.int32)
    size = keysift.select_workspace_size(scores, 300, kernel="cpu")
    for given in (size - 1, 0):
        with pytest.raises(ValueError, match=f"workspace has {given} bytes.* {size}"):
            keysift.select(scores, 300, out=out, workspace=torch.empty(given, dtype=torch.uint8), kernel="cpu")
    assert (out == 7).all()
    keysift.select(scores, 300, out=out, workspace=torch.empty(size, dtype=torch.uint8), kernel="cpu")
    assert torch.equal(out.sort(1).values, keysift.select(scores, 300, sorted=True, kernel="reference"))


def test_a_workspace_of_fewer_threads_serves_more(threads, small_pieces):
    scores, out = torch.randn(64, 600), torch.empty(64, 50, dtype=torch.int32)
    threads(1)
    workspace = torch.empty(kernel.workspace_size(64, 600, 50), dtype=torch.uint8)
    threads(4)
    kernel.run(scores, 50, None, None, 1, None, None, 0, "window", True, out, None, None, workspace)
    assert torch.equal(out, keysift.select(scores, 50, sorted=True, kernel="reference"))


def test_two_python_threads_at_once_do_not_disturb_each_other(threads, small_pieces):
    threads(2)

    def work(seed):
        scores = torch.randn(3, 9000, generator=torch.Generator().manual_seed(seed))
        meant = selected(scores, 200, reference.run)
        return all(torch.equal(a, b) for _ in range(40) for a, b in zip(selected(scores, 200), meant, strict=True))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("first", [True, False])
def test_a_forked_child_does_not_wait_for_threads_that_it_has_not(first):
    program = """
import os, sys, torch, keysift
torch.set_num_threads(2)
scores = torch.randn(64, 4000)
if sys.argv[1] == "True":
    meant = keysift.select(scores, 100, sorted=True, kernel="cpu")
else:  # the child is the first to load the kernel, but torch's threads were its parent's
    meant = keysift.select(scores, 100, sorted=True, kernel="reference")
    torch.randn(1 << 22).mul(2)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(keysift.select(scores, 100, sorted=True, kernel="cpu"), meant) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    arguments = [sys.executable, "-c", program, str(first)]
    done = subprocess.run(arguments, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_openmp_there_is_one_thread(monkeypatch, small_pieces):
    monkeypatch.setattr(kernel, "_openmp", lambda: None)
    assert kernel._plan(64, 20000, K)[:2] == (1, 1)
    check(torch.randn(2, 5000), K)


def test_where_nothing_may_be_kept_on_disk_the_code_is_compiled_each_time(monkeypatch):
    asked = []

    def fake(signature, cache=False):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function 'work_32': no locator available for file")
        return lambda work: SimpleNamespace(address=kernel._kernel(4)[0].address)

    kernel._kernel(4)
    monkeypatch.setattr(kernel, "cfunc", fake)
    found, _ = kernel._kernel.__wrapped__(4)
    assert asked == [True, False]
    assert found.address == kernel._kernel(4)[0].address


def test_another_error_of_the_compiler_is_not_hidden(monkeypatch):
    def broken(signature, cache=False):
        raise RuntimeError("no such target")

    monkeypatch.setattr(kernel, "cfunc", broken)
    with pytest.raises(RuntimeError, match="no such target"):
        kernel._kernel.__wrapped__(4)


def test_the_workspace_grows_with_threads_and_k_not_with_the_scores(threads):
    threads(2)
    assert kernel.workspace_size(4096, 1 << 20, 2048) == kernel.workspace_size(64, 1 << 20, 2048) < 1 << 18
    assert kernel.workspace_size(1, 64, 2048) < 1 << 14
    assert os.getpid() == dispatch.PROCESS


def test_scratch_follows_the_number_of_threads():
    scores = torch.randn(1, 300_000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = keysift.select(scores, 2048, kernel="cpu", sorted=True)
        torch.set_num_threads(2)
        two = keysift.select(scores, 2048, kernel="cpu", sorted=True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)
