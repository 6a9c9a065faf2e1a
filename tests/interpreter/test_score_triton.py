"""score in Triton's interpreter, against float64 within what float32 sums may differ."""

import os

import pytest
import torch

import keysift
from keysift.ops.score import kernel_triton
from keysift.testing import check_score
from keysift.testing.score import ALONE

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before Triton is imported", allow_module_level=True)

EPS = 2.0**-24
FP8 = torch.float8_e4m3fn
DTYPES = [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2, (FP8, FP8), (torch.bfloat16, FP8)]


def assert_close(scores, q, k, weights, k_scale=1.0):
    """One row: scores [N] of q [H, D] against k [N, D]."""
    q, k, weights = q.double(), k.double(), weights.double()
    wanted = ((q @ k.T).relu() * weights[:, None]).sum(0) * k_scale
    size = ((q.abs() @ k.abs().T) * weights.abs()[:, None]).sum(0) * k_scale
    assert ((scores.double() - wanted).abs() <= (q.shape[0] + q.shape[1] + 4) * EPS * size + 1e-37).all()


def test_the_kit_passes():
    """But for a row alone: numpy's products, which stand in for the chip's, round by the place in a tile."""
    report = check_score("triton")
    assert set(report.failed) <= {ALONE}, str(report)


@pytest.mark.parametrize(("q_dtype", "k_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 300, 8, 32), (3, 130, 3, 20), (70, 40, 16, 8), (2, 260, 64, 128), (1, 1, 1, 1)])
def test_prefill(q_dtype, k_dtype, shape):
    rows, columns, heads, head_dim = shape
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads, head_dim, generator=generator).to(q_dtype)
    k = torch.randn(columns, head_dim, generator=generator).to(k_dtype)
    weights, k_scale = torch.randn(rows, heads, generator=generator), torch.rand(columns, generator=generator)
    starts = torch.randint(-3, columns, (rows,), generator=generator)
    ends = torch.randint(0, columns + 9, (rows,), generator=generator)
    out = torch.full((rows + 1, columns + 3), torch.nan)
    keysift.index_scores(q, k, k_scale, weights, starts, ends, out=out[:, :columns], kernel="triton")
    assert out[rows:].isnan().all()
    assert out[:, columns:].isnan().all()
    for row in range(rows):
        low, high = max(0, int(starts[row])), max(0, int(starts[row]), min(columns, int(ends[row])))
        assert out[row, :low].isnan().all()
        assert out[row, high:].isnan().all()
        assert_close(out[row, low:high], q[row].float(), k[low:high].float(), weights[row], k_scale[low:high].double())


SIZES = [(3, 1, 16), (4, 3, 64), (2, 8, 1)]
CASES = [(*size, programs, stored) for size in SIZES for programs in (1, 5, 64) for stored in ("e4m3fn", "bfloat16")]


@pytest.mark.parametrize(
    ("requests", "next_n", "page_size", "programs", "format"),
    [*CASES, (4, 3, 16, 5, "float32"), (140, 2, 16, 5, "e4m3fn")],
)
@pytest.mark.parametrize("per_row", [False, True])
def test_decode_follows_the_live_lengths(monkeypatch, programs, format, requests, next_n, page_size, per_row):
    """Junk in every page that no request reaches, table entries that name no page beyond, requests of length 0."""
    monkeypatch.setattr(kernel_triton, "RESIDENT", programs)
    heads, head_dim, longest = 4, 16, 140 if requests < 100 else 20
    generator = torch.Generator().manual_seed(requests * next_n)
    layout = keysift.IndexLayout(format, page_size, head_dim, page_stride=page_size * 20 + 4)
    pages = -(-longest // page_size)
    cache = layout.empty(requests * pages)
    cache.untyped_storage().fill_(0x7F)
    table = torch.randperm(requests * pages, generator=generator).view(requests, pages)
    shape = (requests, next_n) if per_row else (requests,)
    lens = torch.randint(-2, longest + 5, shape, generator=generator)
    lens[1] = 0
    reach = (lens.amax(1) if per_row else lens).clamp(0, pages * page_size)
    keys = torch.randn(requests, pages * page_size, head_dim, generator=generator)
    for request, length in enumerate(reach.tolist()):
        position = torch.arange(length)
        slots = table[request, position // page_size] * page_size + position % page_size
        keysift.write_index_cache(keys[request, :length], cache, slots, layout, kernel="reference")
    q = torch.randn(requests * next_n, heads, head_dim, generator=generator)
    q = q.to({"e4m3fn": FP8, "bfloat16": torch.bfloat16}.get(format, torch.float32))
    weights = torch.randn(requests * next_n, heads, generator=generator)
    beyond = torch.arange(pages) * page_size >= reach[:, None]
    out = torch.full((requests * next_n, pages * page_size), torch.nan)
    keysift.paged_index_scores(
        q, cache, weights, lens, table.masked_fill(beyond, 10**8), next_n, layout=layout, out=out, kernel="triton"
    )
    wanted = torch.full_like(out, torch.nan)
    keysift.paged_index_scores(
        q, cache, weights, lens, table, next_n, layout=layout, out=wanted, kernel="reference"
    )  # fmt: skip
    assert torch.equal(out.isnan(), wanted.isnan())
    bound = 40 * EPS * (head_dim * 8.0**2) * heads  # far below any single product that could be missed
    torch.testing.assert_close(out, wanted, rtol=0, atol=bound, equal_nan=True)


@pytest.mark.parametrize("base", ["window", "slot"])
def test_pieces_of_a_row_select_what_the_whole_row_selects(base):
    """Scores and selection in Triton, whatever the memory budget."""
    generator = torch.Generator().manual_seed(3)
    q, weights = torch.randn(4, 4, 16, generator=generator), torch.randn(4, 4, generator=generator)
    cache = torch.randint(-2, 3, (14, 16, 16), generator=generator).float()
    table, lens = torch.randperm(14, generator=generator).view(2, 7).int(), torch.tensor([110, 37])
    kernels = {"score_kernel": "triton", "select_kernel": "triton"}
    args = (q, cache, weights, lens, table, 9, 2)
    whole = keysift.index_decode(*args, index_base=base, **kernels)
    for columns in (9 + 16, 9 + 70):
        pieces = keysift.index_decode(*args, index_base=base, memory_budget=4 * 2 * columns, **kernels)
        assert torch.equal(pieces.sort().values, whole.sort().values)
    args = (q, cache.flatten(0, 1), None, weights, torch.tensor([0, 3, 90, 5]), torch.tensor([112, 4, 7, 99]), 9)
    whole = keysift.index_prefill(*args, **kernels)
    pieces = keysift.index_prefill(*args, memory_budget=4 * 50, **kernels)
    assert torch.equal(pieces.sort().values, whole.sort().values)
