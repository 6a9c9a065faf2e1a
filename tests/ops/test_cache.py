"""cache, each kernel by name, against the contract: exact bytes, and what must not be touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keysift import dispatch
from keysift.layout import FP8, LARGEST, IndexLayout, LatentLayout
from keysift.ops.cache import (
    api,
    cumulative_lengths,
    gather_index_cache,
    gather_latent_cache,
    write_index_cache,
    write_latent_cache,
)

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


def test_a_latent_comes_back_within_its_rounding():
    """As an index key does, tile by tile; the rotary part within half a step of bfloat16."""
    layout = LatentLayout("e4m3fn")
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(6)) * torch.logspace(-5, 3, 576)
    cache, slots = layout.empty(1), torch.arange(64)
    write_latent_cache(x, cache, slots, layout)
    error = (gather_latent_cache(cache, slots, layout) - x).abs()
    scale = x[:, :512].unflatten(1, (4, 128)).abs().amax(2).clamp(min=1e-4).div(448).repeat_interleave(128, 1)
    bound = torch.maximum(x[:, :512].abs() * 2.0**-4, 2.0**-10 * scale)
    assert (error[:, :512] <= bound * (1 + 1e-6)).all()
    assert (error[:, 512:] <= x[:, 512:].abs() * 2.0**-8).all()


def test_rounding_has_no_bias():
    """Numbers uniform between two bytes go up and down alike; five standard deviations of a fair coin's sum."""
    layout = IndexLayout("e4m3fn", 64, 128)
    k = torch.rand(512, 128, generator=torch.Generator().manual_seed(8)) * 32 + 256  # one binade, steps of 32
    k[:, 0] = 448.0  # the scale is 1
    cache = layout.empty(8)
    write_index_cache(k, cache, torch.arange(512), layout)
    error = layout.views(cache)[0].flatten(0, 1).float() - k
    assert error.abs().max() <= 16
    assert abs(float(error[:, 1:].double().mean())) <= 5 * (32 / 12**0.5) / (512 * 127) ** 0.5


def test_a_tie_goes_to_the_even_byte():
    """272 lies between 256 (0x78) and 288 (0x79), 304 between 288 and 320 (0x7A)."""
    layout = IndexLayout("e4m3fn", 1, 4)
    cache = layout.empty(1)
    write_index_cache(torch.tensor([[448.0, 272.0, 304.0, -272.0]]), cache, torch.tensor([0]), layout)
    assert cache[0, 0, :4].tolist() == [0x7E, 0x78, 0x7A, 0xF8]


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


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_latents_of_ue8m0_are_bfloat16_without_rounding(kernel):
    layout = LatentLayout("e4m3fn", 4, 256, 8, scale="ue8m0")
    cache = layout.empty(1)
    write_latent_cache(torch.randn(4, 264), cache, torch.arange(4), layout, kernel=kernel)
    scales = layout.views(cache)[1]
    assert torch.equal(scales.log2(), scales.log2().round())
    exact = gather_latent_cache(cache, torch.arange(4), layout, dtype=torch.float32)
    assert torch.equal(exact, exact.bfloat16().float())


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


def test_lengths_add_up_to_where_requests_end():
    ends = cumulative_lengths(torch.tensor([3, 0, 2], dtype=torch.int32))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, 3, 3, 5]
    assert cumulative_lengths(torch.empty(0, dtype=torch.int64)).tolist() == [0]
    with pytest.raises(ValueError, match="seq_lens has shape"):
        cumulative_lengths(torch.zeros(2, 2, dtype=torch.int32))


def test_the_operators_trace():
    """`torch.compile` in one graph."""
    keys, latents = IndexLayout("e4m3fn", 4, 8, "ue8m0"), LatentLayout("e4m3fn", 4, 128, 4)

    def step(x, key_cache, latent_cache, slots, table, lengths):
        write_index_cache(x[:, :8].contiguous(), key_cache, slots, keys)
        write_latent_cache(x, latent_cache, slots, latents)
        k, scale = gather_index_cache(key_cache, table, cumulative_lengths(lengths), 6, keys)
        return k.view(torch.uint8), scale, gather_latent_cache(latent_cache, slots, latents), key_cache, latent_cache

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    arguments = (torch.arange(6), torch.tensor([[0, 1]]), torch.tensor([6]))
    x = torch.randn(6, 132)
    found = compiled(x, keys.empty(2).zero_(), latents.empty(2).zero_(), *arguments)
    wanted = step(x, keys.empty(2).zero_(), latents.empty(2).zero_(), *arguments)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["write_index", "write_latent", "gather_index", "gather_latent"])
def test_torchs_own_check_of_each_operator(name):
    index, latent = ("e4m3fn", 4, 8), ("e4m3fn", 2, 128, 4)
    slots, numbers = torch.arange(6), torch.randn(6, 132)
    keys, latents = IndexLayout(*index).empty(2).zero_(), LatentLayout(*latent).empty(3).zero_()
    table, ends = torch.tensor([[0, 1]]), torch.tensor([0, 6])
    arguments = {
        "write_index": (numbers[:, :8], keys, slots, *index, "ue8m0", None),
        "write_latent": (numbers, latents, slots, *latent, "ue8m0", None),
        # Plain, since the check compares arguments with torch.allclose, which fp8 lacks.
        "gather_index": (torch.zeros(2, 4, 8), table, ends, "float32", 4, 8, torch.zeros(6, 8), None, None),
        "gather_latent": (latents, slots, *latent, torch.zeros(6, 132), None),
    }[name]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.keysift, f"{name}_cache").default, arguments, test_utils=tests)
