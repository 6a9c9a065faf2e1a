"""score, each kernel by name, against float64 and the contract's lines."""

import pytest
import torch

import keysift
from keysift import dispatch
from keysift.ops.score.api import KERNELS as TABLE
from keysift.ops.score.api import Problem
from keysift.ops.score.kernel_cpu import TILE

RUNNABLE = Problem(dispatch.parse_device("cpu"), torch.float32, torch.float32, 1, 1, 1, 1)
KERNELS = [kernel.name for kernel in TABLE if not kernel.unmet(RUNNABLE)]
EPS = 2.0**-24  # half a unit in the last place of float32
# rows, columns, heads, head size: round a tile, odd everything, V3.2's index, many rows, nothing
SHAPES = [
    (3, TILE - 1, 4, 16), (2, TILE, 3, 7), (2, TILE + 1, 1, 1), (5, 1300, 5, 24), (2, 700, 64, 128), (90, 40, 2, 8),
    (0, 10, 2, 8), (4, 0, 2, 8),
]  # fmt: skip


def make(rows, columns, heads, head_dim, dtype=torch.float32):
    q = torch.randn(rows, heads, head_dim).to(dtype)
    k = torch.randn(columns, head_dim).to(dtype)
    return q, k, torch.randn(rows, heads)


def exact(q, k, weights, k_scale=None):
    """Scores in float64 and how far a float32 accumulation in any order may be from them."""
    q, k, weights = q.double(), k.double(), weights.double()
    scale = 1.0 if k_scale is None else k_scale.double()
    scores = torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q, k).relu(), weights) * scale
    size = torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q.abs(), k.abs()), weights.abs()) * abs(scale)
    return scores, (q.shape[1] + q.shape[2] + 4) * EPS * size


def assert_close(scores, q, k, weights, k_scale=None):
    wanted, bound = exact(q, k, weights, k_scale)
    off = (scores.double() - wanted).abs()
    assert (off <= bound).all(), f"off by {off.max()}, allowed {bound[off > bound][:1]}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_formula(kernel, shape):
    q, k, weights = make(*shape)
    scores = keysift.index_scores(q, k, None, weights, kernel=kernel)
    assert scores.shape == (shape[0], shape[1])
    assert_close(scores, q, k, weights)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_dtype_and_a_key_scale(kernel, dtype):
    q, k, weights = make(4, 600, 8, 32, dtype)
    k_scale = torch.rand(600) + 0.5
    scores = keysift.index_scores(q, k, k_scale, weights, kernel=kernel)
    assert_close(scores, q.float(), k.float(), weights, k_scale)


def test_queries_and_keys_may_differ_in_dtype():
    q, k, weights = make(3, 50, 4, 16)
    k = k.bfloat16()
    assert_close(keysift.index_scores(q, k, None, weights), q, k, weights)


def test_relu_comes_before_the_weight():
    q, k = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0]])
    assert keysift.index_scores(q, k, None, torch.tensor([[-3.0, 5.0]])).item() == -6.0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [3, 70])  # tiles in a batch, rows in a batch
def test_only_cells_inside_the_windows_are_written(kernel, rows):
    q, k, weights = make(rows, 1500, 4, 16)
    starts = torch.randint(-50, 1600, (rows,))
    ends = starts + torch.randint(-10, 1600, (rows,))
    lower = starts.clamp(0, 1500)
    upper = torch.maximum(ends.clamp(0, 1500), lower)
    column = torch.arange(1500)
    inside = (column >= lower[:, None]) & (column < upper[:, None])
    whole = torch.full((rows + 2, 1600), torch.nan)
    out = whole[1:-1, 30:1550]
    returned = keysift.index_scores(q, k, None, weights, starts, ends.int(), out=out, kernel=kernel)
    assert returned is out
    written = torch.zeros_like(whole, dtype=torch.bool)
    written[1:-1, 30:1530] = inside
    assert torch.equal(written, ~whole.isnan())
    wanted, bound = exact(q, k, weights)
    assert ((out[:, :1500].double() - wanted).abs() <= bound)[inside].all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [2, 40])
def test_keys_outside_the_windows_may_hold_anything(kernel, rows):
    q, k, weights = make(rows, 900, 4, 16)
    starts, ends = torch.full((rows,), 100), torch.full((rows,), 800)
    clean = keysift.index_scores(q, k, None, weights, starts, ends, kernel=kernel)[:, 100:800].clone()
    k[:100], k[800:] = torch.nan, torch.inf
    assert torch.equal(clean, keysift.index_scores(q, k, None, weights, starts, ends, kernel=kernel)[:, 100:800])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(67, 1300, 64, 128), (67, 1300, 5, 11), (300, 700, 2, 64), (40, 1025, 16, 3)])
def test_a_row_does_not_depend_on_the_others(kernel, shape):
    """Bit for bit: alone, among fewer, at another place, beside rows with other windows."""
    rows, columns = shape[:2]
    q, k, weights = make(rows + 1, columns + 1, *shape[2:])
    q, k, weights = q[1:], k[1:], weights[1:]  # where the parts of a larger tensor lie must not matter either
    together = keysift.index_scores(q, k, None, weights, kernel=kernel)
    for row in (0, 1, rows // 2, rows - 1):
        alone = keysift.index_scores(q[row : row + 1], k, None, weights[row : row + 1], kernel=kernel)
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(rows)[: rows // 2]
    starts, ends = torch.randint(0, columns // 2, (len(order),)), torch.randint(columns // 2, columns, (len(order),))
    some = keysift.index_scores(q[order], k, None, weights[order], starts, ends, kernel=kernel)
    for i, row in enumerate(order.tolist()):
        window = slice(int(starts[i]), int(ends[i]))
        assert torch.equal(some[i, window], together[row, window])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 16, 700])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("per_row", [False, True])
def test_pages_mean_what_keys_in_one_piece_mean(kernel, page_size, next_n, per_row):
    requests, pages = 3, -(-700 // page_size)
    cache = torch.randn(requests * pages + 5, 2 * page_size, 16)[:, :page_size]  # page stride larger than a page
    table = torch.randperm(len(cache))[: requests * pages].view(requests, pages).int()
    q, _, weights = make(requests * next_n, 0, 4, 16)
    lens = torch.tensor([pages * page_size, min(pages * page_size, 333), 0])
    if per_row:
        seq_lens = torch.stack([lens - j for j in range(next_n)], 1)
        ends = seq_lens.flatten()
    else:
        seq_lens = lens
        ends = (lens[:, None] - next_n + 1 + torch.arange(next_n)).flatten()
    reached = torch.arange(pages) * page_size < lens[:, None]
    dirty = torch.where(reached, table, torch.iinfo(torch.int32).max)
    out = torch.full((requests * next_n, pages * page_size), torch.nan)
    keysift.paged_index_scores(q, cache, weights, seq_lens, dirty, next_n, out=out, kernel=kernel)
    for row in range(requests * next_n):
        k = cache[table[row // next_n].long()].flatten(0, 1)
        end = max(int(ends[row]), 0)
        one = slice(row, row + 1)
        alone = keysift.index_scores(q[one], k, None, weights[one], ends=ends[one], kernel=kernel)
        assert torch.equal(out[row, :end], alone[0, :end])
        assert out[row, end:].isnan().all()


def test_a_narrower_out_scores_fewer_columns():
    q, k, weights = make(1, 40, 2, 8)
    out = torch.full((1, 25), torch.nan)
    keysift.paged_index_scores(q, k.view(4, 10, 8), weights, torch.tensor([40]), torch.arange(4)[None], out=out)
    assert torch.equal(out, keysift.index_scores(q, k, None, weights)[:, :25])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_fp8_pages_score_like_their_keys_in_one_piece(kernel, format, page_size):
    """Junk, NaN among it, in every page and table entry that no request reaches, and between the pages."""
    layout = keysift.IndexLayout(format, page_size, 32, page_stride=page_size * 36 + 8)
    lens, next_n = torch.tensor([70, 3, 0]), 2
    pages = -(-70 // page_size)
    cache = layout.empty(3 * pages)
    cache.untyped_storage().fill_(0x7F)
    table = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(page_size)).view(3, pages)
    q, k, weights = make(6, 70, 8, 32)
    for request, length in enumerate(lens.tolist()):
        position = torch.arange(length)
        slots = table[request, position // page_size] * page_size + position % page_size
        keysift.write_index_cache(k[:length], cache, slots, layout)
    table = table.masked_fill(torch.arange(pages) * page_size >= lens[:, None], 10**6)
    queries = q.to(torch.float8_e4m3fn) if format == "e4m3fn" else q
    out = torch.full((6, pages * page_size), torch.nan)
    keysift.paged_index_scores(queries, cache, weights, lens, table, next_n, layout=layout, out=out, kernel=kernel)
    ends = (lens[:, None] - next_n + 1 + torch.arange(next_n)).clamp(min=0).flatten()
    keys, scale = keysift.gather_index_cache(cache, table[:1], torch.tensor([0, 70]), 70, layout)
    for row, end in enumerate(ends.tolist()):
        assert out[row, end:].isnan().all()
        part = slice(row, row + 1)
        given = None if scale is None else scale[:end]
        assert_close(out[part, :end], queries[part].float(), keys[:end].float(), weights[part], given)


def test_a_negative_page_is_never_the_last_page():
    q, k, weights = make(1, 40, 2, 8)
    for table in ([-1], [0, -1]):
        with pytest.raises(IndexError):
            keysift.paged_index_scores(
                q, k.view(-1, 40 // len(table), 8), weights, torch.tensor([40]), torch.tensor([table]), kernel="cpu"
            )


q2, k2, w2 = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(2, 3)
lens2, table2, cache2 = torch.tensor([3, 3]), torch.zeros(2, 1, dtype=torch.int32), torch.randn(1, 5, 4)
REFUSED = [
    (lambda: keysift.index_scores(q2[0], k2, None, w2), ValueError, "q has shape"),
    (lambda: keysift.index_scores(q2.int(), k2, None, w2), TypeError, "q is torch.int32"),
    (lambda: keysift.index_scores(q2, k2.double(), None, w2), TypeError, "k is torch.float64"),
    (lambda: keysift.index_scores(q2, k2[:, :3], None, w2), ValueError, "k has shape"),
    (lambda: keysift.index_scores(q2, k2, torch.ones(4), w2), ValueError, "k_scale has shape"),
    (lambda: keysift.index_scores(q2, k2, None, w2.half()), TypeError, "weights is torch.float16"),
    (lambda: keysift.index_scores(q2, k2, None, w2[:1]), ValueError, "weights has shape"),
    (lambda: keysift.index_scores(q2, k2, None, w2, torch.tensor([1])), ValueError, "starts has shape"),
    (lambda: keysift.index_scores(q2, k2, None, w2, None, torch.ones(2)), TypeError, "ends is torch.float32"),
    (lambda: keysift.index_scores(q2, k2, None, w2, out=torch.empty(2, 4)), ValueError, "out has shape"),
    (lambda: keysift.index_scores(q2, k2, None, w2, out=torch.empty(5, 2).T), ValueError, "out has stride"),
    (lambda: keysift.index_scores(q2, k2, None, w2, kernel="fast"), ValueError, "kernel is 'fast'"),
    (lambda: keysift.index_scores(q2, [1], None, w2), TypeError, "k is list"),
    (
        lambda: keysift.paged_index_scores(q2, cache2.to(torch.uint8), w2, lens2, table2),
        TypeError,
        "cache is torch.uint8, fp8 keys with their scales; layout must say which",
    ),
    (
        lambda: keysift.paged_index_scores(q2, cache2, w2, lens2, table2, layout=keysift.LatentLayout()),
        TypeError,
        "layout is LatentLayout",
    ),
    (
        lambda: keysift.paged_index_scores(q2, cache2, w2, lens2, table2, layout=keysift.IndexLayout("float32", 7, 4)),
        ValueError,
        "cache has shape",
    ),
    (lambda: keysift.paged_index_scores(q2, cache2[..., :3], w2, lens2, table2), ValueError, "cache has shape"),
    (lambda: keysift.paged_index_scores(q2, cache2, w2, lens2[:1], table2), ValueError, "seq_lens has 1 requests"),
    (lambda: keysift.paged_index_scores(q2, cache2, w2, lens2, table2[:1]), ValueError, "block_table has shape"),
    (lambda: keysift.paged_index_scores(q2, cache2, w2, lens2, table2, 0), ValueError, "next_n is 0"),
    (lambda: keysift.paged_index_scores(q2, cache2, w2, lens2, table2, 1.0), TypeError, "next_n is 1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message.replace("[", r"\[")):
        call()


@pytest.mark.parametrize(
    ("lens", "table", "message"),
    [([3, 9], [[0], [0]], r"seq_lens\[1\] is 9"), ([3, 3], [[0], [7]], r"block_table\[1, 0\] is 7")],
)
def test_checked_values(monkeypatch, lens, table, message):
    monkeypatch.setattr(dispatch, "CHECK_VALUES", True)
    with pytest.raises(ValueError, match=message):
        keysift.paged_index_scores(q2, cache2, w2, torch.tensor(lens), torch.tensor(table))


def test_the_operator():
    """Its schema and fake are true, and a whole graph can be traced through it."""
    out = torch.empty(2, 5)
    args = (q2, k2, None, w2, None, torch.tensor([2, 5]), 1, None, out, None)
    torch.library.opcheck(torch.ops.keysift.score.default, args, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda q, k, w: keysift.index_scores(q, k, None, w) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q2, k2, w2), keysift.index_scores(q2, k2, None, w2) + 1)
