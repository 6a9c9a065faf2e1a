"""cache, each kernel by name, against the contract: exact bytes, and what must not be touched."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysift import dispatch
from keysift.layout import FP8, LARGEST, IndexLayout, LatentLayout
from keysift.ops.cache import api, gather_index_cache, gather_latent_cache, write_index_cache, write_latent_cache

RUNNABLE = api.Problem(dispatch.parse_device("cpu"), "write_index", "e4m3fn", 1, 128)
KERNELS = [kernel.name for kernel in api.KERNELS if not kernel.unmet(RUNNABLE)]
FORMATS = ["e4m3fn", "e4m3fnuz", "bfloat16", "float16", "float32"]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def filled(layout, pages, byte=0x55):
    cache = layout.empty(pages)
    cache.view(torch.uint8).fill_(byte) if cache.is_contiguous() else cache.untyped_storage().fill_(byte)
    return cache


def values_with_everything(tokens, width, seed, dtype=torch.float32):
    """Tokens of every magnitude, one of zeros, one with NaN, one with infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator) * torch.logspace(-7, 4, tokens)[:, None]
    x[tokens // 3] = 0.0
    x[tokens // 2, 1], x[-1, 0], x[-1, -1] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


@each_kernel
def test_a_page_of_index_keys_byte_by_byte(kernel):
    """All values of a page first, then all its scales: token 1 of 2, D = 4."""
    layout = IndexLayout("e4m3fn", page_size=2, head_dim=4)
    cache = filled(layout, 1)
    write_index_cache(torch.tensor([[7.0, -3.5, 0.0, 1.75]]), cache, torch.tensor([1]), layout, kernel=kernel)
    untouched = [0x55] * 4
    # 7 / 448 = 2**-6 is the scale; 448 is 0x7E, 224 is 0x76, 112 is 0x6E
    assert cache.flatten().tolist() == [*untouched, 0x7E, 0xF6, 0x00, 0x6E, *untouched, 0x00, 0x00, 0x80, 0x3C]


@each_kernel
def test_a_token_of_latents_byte_by_byte(kernel):
    layout = LatentLayout("e4m3fn", page_size=1)
    cache = filled(layout, 2)
    latent = torch.zeros(1, 576)
    latent[0, :512] = torch.tensor([448.0, 224.0, 7.0, 0.0]).repeat_interleave(128)
    latent[0, 512:] = 1.5
    write_latent_cache(latent, cache, torch.tensor([1]), layout, kernel=kernel)
    token = cache[1, 0]
    assert token[:384].unique().tolist() == [0x7E]
    assert token[384:512].unique().tolist() == [0]
    assert token[512:528].view(torch.float32).tolist() == [1.0, 0.5, 2.0**-6, torch.tensor(1e-4).div(448).item()]
    assert token[528:].view(torch.bfloat16).tolist() == [1.5] * 64
    assert cache[0].unique().tolist() == [0x55]


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_index_keys_have_the_same_bytes_from_every_kernel(kernel, format, page_size, dtype):
    scale = "ue8m0" if page_size > 3 else "float32"
    layout = IndexLayout(format, page_size, 32, scale)
    pages = -(-60 // page_size)
    k = values_with_everything(40, 32, page_size, dtype)
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))[:40]
    slots[7] = -1
    slots = slots.int() if page_size % 2 else slots
    found, wanted = filled(layout, pages), filled(layout, pages)
    write_index_cache(k, found, slots, layout, kernel=kernel)
    write_index_cache(k, wanted, slots, layout, kernel="reference")
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@each_kernel
@pytest.mark.parametrize("format", ["e4m3fn", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("value_dim", "rope_dim"), [(512, 64), (128, 2), (256, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_latents_have_the_same_bytes_from_every_kernel(kernel, format, value_dim, rope_dim, dtype):
    layout = LatentLayout(format, 4, value_dim, rope_dim)
    latent = values_with_everything(10, value_dim + rope_dim, 3, dtype)
    slots = torch.tensor([3, 2, 15, 0, -1, 9, 12, -5, 7, 8])
    found, wanted = filled(layout, 4), filled(layout, 4)
    write_latent_cache(latent, found, slots, layout, kernel=kernel)
    write_latent_cache(latent, wanted, slots, layout, kernel="reference")
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    slots = torch.cat((slots, torch.tensor([-(2**31)])))
    for result in (torch.float32, torch.bfloat16, torch.float16):
        numbers = gather_latent_cache(found, slots, layout, dtype=result, kernel=kernel)
        right = gather_latent_cache(found, slots, layout, dtype=result, kernel="reference")
        torch.testing.assert_close(numbers, right, rtol=0, atol=0, equal_nan=True)
        assert (numbers[slots < 0] == 0).all()


@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_a_value_comes_back_within_its_rounding(format, scale):
    """Half a step of 3 mantissa bits, or half a subnormal step; in units of the scale. And without bias."""
    layout = IndexLayout(format, 64, 128, scale)
    k = torch.randn(512, 128, generator=torch.Generator().manual_seed(5))
    cache = layout.empty(8)
    write_index_cache(k, cache, torch.arange(512), layout)
    table, ends = torch.arange(8)[None], torch.tensor([0, 512])
    codes, scales = gather_index_cache(cache, table, ends, 512, layout)
    assert (k.abs().amax(1) / scales <= LARGEST[format] * (1 + 1e-6)).all()
    error = codes.float() * scales[:, None] - k
    least = 2.0 ** (-11 if format == "e4m3fnuz" else -10)
    bound = torch.maximum(k.abs() * 2.0**-4, least * scales[:, None])
    assert (error.abs() <= bound * (1 + 1e-6)).all()
    assert abs(float((error / scales[:, None]).mean())) < 5 * float((error / scales[:, None]).std()) / 256


@pytest.mark.parametrize("format", ["e4m3fn", "e4m3fnuz"])
def test_ue8m0_rounds_up_to_a_power_of_two(format):
    layout = IndexLayout(format, 4, 4, "ue8m0")
    largest = LARGEST[format]
    k = torch.zeros(4, 4)
    k[:, 0] = torch.tensor([largest, largest * (1 + 2**-20), largest / 2, 0.0])
    cache = layout.empty(1)
    write_index_cache(k, cache, torch.arange(4), layout)
    scales = layout.views(cache)[1][0]
    least = 2.0 ** torch.tensor(1e-4 / largest).log2().ceil()
    assert scales.tolist() == [1.0, 2.0, 0.5, float(least)]


@each_kernel
def test_a_tiny_negative_is_plus_zero_in_e4m3fnuz(kernel):
    layout = IndexLayout("e4m3fnuz", 1, 4)
    cache = layout.empty(1)
    write_index_cache(torch.tensor([[224.0, -1e-9, -0.0, 0.0]]), cache, torch.tensor([0]), layout, kernel=kernel)
    assert cache[0, 0, 1:4].tolist() == [0, 0, 0]
    assert not layout.views(cache)[0].float().isnan().any()


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_touch_their_own_token_alone(kernel, format):
    layout = IndexLayout(format, 4, 8)
    k = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    alone, beside = layout.empty(1), layout.empty(1)
    write_index_cache(k, alone, torch.arange(4), layout, kernel=kernel)
    k[1, 3], k[2, 0] = torch.nan, torch.inf
    write_index_cache(k, beside, torch.arange(4), layout, kernel=kernel)
    values, scales = layout.views(beside)
    before, scales_before = layout.views(alone)
    for token in (0, 3):
        assert torch.equal(values[0, token].float(), before[0, token].float())
    assert values[0, 1].float().isnan().sum() == 1
    if layout.is_fp8:
        assert float(values[0, 2, 0].float()) == LARGEST[format]
        assert scales.isfinite().all()
        assert scales[0, 0] == scales_before[0, 0]


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
def test_strided_pools_keep_what_lies_between_the_pages(kernel, format):
    size = IndexLayout(format, 4, 32)
    stride = 4 * size.width + 16
    layout = IndexLayout(format, 4, 32, page_stride=stride)
    cache = layout.empty(3)
    cache.untyped_storage().fill_(0x55)
    write_index_cache(torch.randn(12, 32), cache, torch.randperm(12), layout, kernel=kernel)
    pool = cache.as_strided((3, stride), (stride, 1)).view(torch.uint8)
    assert (pool[:, 4 * size.width * cache.element_size() :] == 0x55).all()
    k, _ = gather_index_cache(cache, torch.tensor([[2, 0, 1]]), torch.tensor([0, 12]), 12, layout, kernel=kernel)
    plain = IndexLayout(format, 4, 32)
    dense = plain.empty(3).copy_(cache)
    wanted, _ = gather_index_cache(
        dense, torch.tensor([[2, 0, 1]]), torch.tensor([0, 12]), 12, plain, kernel="reference"
    )
    assert torch.equal(k.view(torch.uint8), wanted.view(torch.uint8))


@each_kernel
def test_a_single_page_may_have_any_stride_in_its_first_dimension(kernel):
    index, latent = IndexLayout("e4m3fn", 1, 128), LatentLayout("e4m3fn", 1, 128, 4)
    keys, latents = torch.randn(1, 128), torch.randn(1, 132)
    slot = torch.tensor([0])
    odd = torch.zeros(400, dtype=torch.uint8).as_strided((1, 1, index.width), (133, 1, 1))
    even = index.empty(1)
    for cache in (odd, even):
        write_index_cache(keys, cache, slot, index, kernel=kernel)
    assert torch.equal(odd, even)
    odd = torch.zeros(400, dtype=torch.uint8).as_strided((1, 1, latent.width), (141, 1, 1))
    even = latent.empty(1)
    for cache in (odd, even):
        write_latent_cache(latents, cache, slot, latent, kernel=kernel)
    assert torch.equal(odd, even)


@each_kernel
def test_pages_beyond_four_gigabytes(kernel):
    """Virtual memory of which two pages are touched: page ids in the hundreds of thousands, strides of a megabyte."""
    layout = IndexLayout("e4m3fn", 64, 128, page_stride=1 << 20)
    try:
        pool = torch.empty(5000 << 20, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("no 5 GB of address space")
    cache = pool.as_strided((5000, 64, 132), (1 << 20, 132, 1))
    k = torch.randn(2, 128)
    write_index_cache(k, cache, torch.tensor([4999 * 64 + 63, 4500 * 64]), layout, kernel=kernel)
    table = torch.tensor([[4999], [4500]])
    gathered, scale = gather_index_cache(cache, table, torch.tensor([0, 64, 65]), 65, layout, kernel=kernel)
    torch.testing.assert_close(gathered[63].float() * scale[63], k[0], rtol=2**-4, atol=1e-2)
    torch.testing.assert_close(gathered[64].float() * scale[64], k[1], rtol=2**-4, atol=1e-2)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    page_size=st.integers(1, 17),
    spare=st.integers(0, 3),
    format=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_gather_packs_the_requests_one_after_another(lengths, page_size, spare, format, seed):
    """Against a loop in Python; rows beyond the last request keep what they held."""
    generator = torch.Generator().manual_seed(seed)
    layout = IndexLayout(format, page_size, 8)
    pages = max(1, -(-max(lengths) // page_size)) + 1
    cache = layout.empty(len(lengths) * pages)
    tokens = cache.shape[0] * page_size
    write_index_cache(torch.randn(tokens, 8, generator=generator), cache, torch.arange(tokens), layout)
    table = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    total = int(ends[-1]) + spare
    for kernel in KERNELS:
        out = torch.empty(total, 8, dtype=FP8.get(format, layout.dtype))
        out.view(torch.uint8).fill_(0x33)
        scale = torch.full((total,), 7.0) if layout.is_fp8 else None
        gather_index_cache(cache, table, ends, total, layout, out=out, out_scale=scale, kernel=kernel)
        values, scales = layout.views(cache)
        row = 0
        for request, length in enumerate(lengths):
            for position in range(length):
                page, offset = int(table[request, position // page_size]), position % page_size
                assert torch.equal(out[row].float(), values[page, offset].float()), f"{kernel}, seed {seed}"
                assert scale is None or scale[row] == scales[page, offset]
                row += 1
        assert (out[row:].view(torch.uint8) == 0x33).all()
        assert scale is None or (scale[row:] == 7.0).all()


LAYOUT = IndexLayout("e4m3fn", 4, 8)
CACHE = torch.zeros(2, 4, 12, dtype=torch.uint8)
K, SLOTS, TABLE, ENDS = torch.zeros(3, 8), torch.arange(3), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 5])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: write_index_cache(K, CACHE, SLOTS, LatentLayout()), TypeError, "layout is LatentLayout"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("e4m3fn", 2, 8)), ValueError, "cache has shape"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("bfloat16", 4, 12)), TypeError, "cache is torch.uint8"),
        (lambda: write_index_cache(K, CACHE[:, :, ::2], SLOTS, LAYOUT), ValueError, "cache has shape"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("e4m3fn", 4, 8, page_stride=64)), ValueError, "apart"),
        (lambda: write_index_cache(K[:, :4], CACHE, SLOTS, LAYOUT), ValueError, "k has shape"),
        (lambda: write_index_cache(K.double(), CACHE, SLOTS, LAYOUT), TypeError, "k is torch.float64"),
        (lambda: write_index_cache(K, CACHE, SLOTS[:2], LAYOUT), ValueError, r"slot_mapping has shape \[2\]"),
        (lambda: write_index_cache(K, CACHE, SLOTS.float(), LAYOUT), TypeError, "slot_mapping is torch.float32"),
        (lambda: write_index_cache(K, CACHE, SLOTS, LAYOUT, kernel="triton"), ValueError, "cannot run this cache"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS[:1], 5, LAYOUT), ValueError, "cu_seqlens has shape"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS, -1, LAYOUT), ValueError, "tokens is -1"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS, 5, LAYOUT, out=K), TypeError, "out is torch.float32"),
        (lambda: gather_latent_cache(K[None], SLOTS, LatentLayout("float32", 3, 6, 2), dtype=torch.int8), TypeError,
         "dtype is torch.int8"),
        (lambda: IndexLayout("e5m2"), ValueError, "format is 'e5m2'"),
        (lambda: IndexLayout(scale="bf16"), ValueError, "scale is 'bf16'"),
        (lambda: IndexLayout(page_size=0), ValueError, "page_size is 0"),
        (lambda: IndexLayout(head_dim=6), ValueError, "head_dim is 6"),
        (lambda: LatentLayout("e4m3fn", value_dim=64), ValueError, "value_dim and rope_dim are 64"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument_and_write_nothing(call, error, words):
    before = CACHE.clone()
    if "cannot run" in words and "triton" in KERNELS:
        pytest.skip("Triton runs here")
    with pytest.raises(error, match=words):
        call()
    assert torch.equal(CACHE, before)


def test_keysift_check_names_the_first_bad_slot():
    code = """
import torch
from keysift.layout import IndexLayout
from keysift.ops.cache import gather_index_cache, write_index_cache
layout = IndexLayout("e4m3fn", 4, 8)
cache = torch.zeros(2, 4, 12, dtype=torch.uint8)
table = torch.tensor([[0, 5]])
for call in (
    lambda: write_index_cache(torch.ones(3, 8), cache, torch.tensor([7, -1, 8]), layout),
    lambda: gather_index_cache(cache, table, torch.tensor([0, 5]), 5, layout),
    lambda: gather_index_cache(cache, table, torch.tensor([0, 9]), 9, layout),
):
    try:
        call()
    except ValueError as error:
        print(error, bool(cache.any()))
write_index_cache(torch.ones(3, 8), cache, torch.tensor([7, -1, 0]), layout)
gather_index_cache(cache, table, torch.tensor([0, 4]), 4, layout)
print("passes")
"""
    environment = {**os.environ, "KEYSIFT_CHECK": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    lines = run.stdout.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "slot_mapping[2] is 8",
        "block_table[0, 1] is 5",
        "cu_seqlens[0] is 9",
        "passes",
    ]
    assert all(line.endswith("False") for line in lines[:-1])


def test_the_operators_trace():
    """`torch.compile` in one graph, and torch's own check of an operator."""
    layout = IndexLayout("e4m3fn", 4, 8)

    def step(k, cache, slots, table, ends):
        write_index_cache(k, cache, slots, layout)
        return gather_index_cache(cache, table, ends, 6, layout)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    k, slots, table, ends = torch.randn(6, 8), torch.arange(6), torch.tensor([[0, 1]]), torch.tensor([0, 6])
    found = compiled(k, layout.empty(2).zero_(), slots, table, ends)
    wanted = step(k, layout.empty(2).zero_(), slots, table, ends)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    torch.library.opcheck(
        torch.ops.keysift.write_index_cache.default, (k, layout.empty(2), slots, "e4m3fn", 4, 8, "float32", None)
    )
