"""cache in Triton's interpreter: the bytes of the reference, whatever the format, the page and the value."""

import os

import pytest
import torch

from keysift.layout import FP8, LARGEST, IndexLayout, LatentLayout
from keysift.ops.cache import gather_index_cache, gather_latent_cache, write_index_cache, write_latent_cache
from keysift.testing import check_cache

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before Triton is imported", allow_module_level=True)

FORMATS = ["e4m3fn", "e4m3fnuz", "bfloat16", "float16", "float32"]


def everything(tokens, width, dtype=torch.float32):
    """Tokens of every magnitude, one of zeros, one with NaN, one with infinities, one with tiny negatives."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator) * torch.logspace(-7, 4, tokens)[:, None]
    x[tokens // 3] = 0.0
    x[tokens // 2, 1], x[-1, 0], x[-1, -1] = torch.nan, torch.inf, -torch.inf
    x[1], x[1, 0] = -1e-6, 1.0
    return x.to(dtype)


def both(layout, pages, write):
    """The bytes that Triton and the reference leave in a pool whose pages lie apart."""
    left = []
    for kernel in ("triton", "reference"):
        cache = layout.empty(pages)
        cache.untyped_storage().fill_(0x55)
        write(cache, kernel)
        left.append(torch.tensor(cache.untyped_storage().tolist(), dtype=torch.uint8))
    return left


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the interpreter, where float16 overflows
def test_the_kit_passes():
    report = check_cache("triton")
    assert report.ok, str(report)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_index_keys(format, scale, dtype):
    layout = IndexLayout(format, 5, 24, scale, page_stride=5 * 28 + 12)
    k = everything(12, 24, dtype).t().contiguous().t()  # columns lie apart
    slots = torch.tensor([3, 14, 0, 7, -1, 9, 12, -8, 1, 2, 11, 6])
    found, wanted = both(layout, 3, lambda cache, kernel: write_index_cache(k, cache, slots, layout, kernel=kernel))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("format", ["e4m3fn", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("value_dim", "rope_dim"), [(256, 64), (128, 2), (128, 0), (128, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_latents(format, value_dim, rope_dim, dtype):
    layout = LatentLayout(format, 2, value_dim, rope_dim)
    latent, slots = everything(7, value_dim + rope_dim, dtype), torch.tensor([5, 2, -1, 0, 7, 1, 6])
    latent[:, -2:] = torch.tensor([[-torch.nan, 1 + 2**-8]], dtype=dtype)  # a NaN with a sign, and a tie for bfloat16
    found, wanted = both(
        layout, 4, lambda cache, kernel: write_latent_cache(latent, cache, slots, layout, kernel=kernel)
    )
    assert torch.equal(found, wanted)
    cache = layout.empty(4)
    write_latent_cache(latent, cache, slots, layout, kernel="reference")
    slots[3] = -4
    for result in (torch.float32, torch.bfloat16, torch.float16):
        numbers, right = (
            gather_latent_cache(cache, slots, layout, dtype=result, kernel=kernel) for kernel in ("triton", "reference")
        )
        torch.testing.assert_close(numbers, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gathered_keys(format, page_size):
    layout = IndexLayout(format, page_size, 24, page_stride=page_size * 28 + 12)
    pages = -(-20 // page_size) + 1
    cache = layout.empty(pages)
    cache.untyped_storage().fill_(0x55)  # the table begins with a page that nothing was written to
    write_index_cache(everything(20, 24), cache, torch.arange(20), layout, kernel="reference")
    table = torch.arange(pages - 1, -1, -1)[None, :].expand(3, -1)  # a stride of 0 between requests
    ends = torch.tensor([0, 4, 4, 4 + min(9, pages * page_size)], dtype=torch.int32)
    results = []
    for kernel in ("triton", "reference"):
        out = torch.empty(16, 24, dtype=FP8.get(format, layout.dtype))
        out.view(torch.uint8).fill_(0x33)
        scale = torch.full((16,), 7.0) if layout.is_fp8 else None
        gather_index_cache(cache, table, ends, 15, layout, out=out, out_scale=scale, kernel=kernel)
        results.append((out.view(torch.uint8), scale.view(torch.uint8) if scale is not None else out.new_zeros(1)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("format", FP8)
def test_every_float32_near_every_boundary_of_fp8(format):
    """All codes, the middles between them, and the float32 numbers beside each: the byte of torch's own cast."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8[format]).float()
    codes = codes[codes.isfinite()].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat((codes, middles))
    x = torch.cat((exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))))
    x = x[x.abs() <= LARGEST[format]]
    keys = torch.zeros(-(-len(x) // 63), 64)
    keys[:, 0] = LARGEST[format]  # so that the scale is 1
    keys[:, 1:] = torch.nn.functional.pad(x, (0, len(keys) * 63 - len(x))).view(-1, 63)
    layout = IndexLayout(format, len(keys), 64)
    cache = layout.empty(1)
    write_index_cache(keys, cache, torch.arange(len(keys)), layout, kernel="triton")
    values, scales = layout.views(cache)
    assert (scales == 1).all()
    assert torch.equal(values[0].view(torch.uint8), keys.to(FP8[format]).view(torch.uint8))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_offsets_beyond_four_gigabytes(integers):
    """Pages a megabyte apart, of which two are touched; all four operations, either integer."""
    try:
        pool = torch.empty(5000 << 20, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("no 5 GB of address space")
    keys, latents = IndexLayout("e4m3fn", 4, 8), LatentLayout("e4m3fn", 4, 128, 4)
    slots, table = (
        torch.tensor([4999 * 4 + 3, 4500 * 4], dtype=integers),
        torch.tensor([[4500], [4999]], dtype=integers),
    )
    ends, x = torch.tensor([0, 1, 5], dtype=integers), torch.randn(2, 132)
    found = []
    for kernel in ("triton", "reference"):
        pool.view(5000, -1)[[4500, 4999], :1024] = 0
        cache = pool.as_strided((5000, 4, keys.width), (1 << 20, keys.width, 1))
        write_index_cache(x[:, :8], cache, slots, keys, kernel=kernel)
        k, scale = gather_index_cache(cache, table, ends, 5, keys, kernel=kernel)
        cache = pool[512:].as_strided((5000, 4, latents.width), (1 << 20, latents.width, 1), 1024)
        write_latent_cache(x, cache, slots, latents, kernel=kernel)
        found.append((k.view(torch.uint8), scale, gather_latent_cache(cache, slots, latents, kernel=kernel)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert found[0][2].abs().sum() > 0
