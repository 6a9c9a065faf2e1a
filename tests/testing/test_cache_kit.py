"""The kit for cache finds the faults that kernels of this kind have had, each in its own line of the contract."""

import pytest
import torch

from keysift import dispatch
from keysift.layout import IndexLayout, LatentLayout
from keysift.ops.cache import api, reference
from keysift.testing import cache_kernels, check_cache
from keysift.testing.cache import GATHER, INDEX, LATENT, LINES, OUTPUT, REFUSED, REPEAT, SLOTS, table

pytestmark = pytest.mark.usefixtures("fresh_choices")


def scales_beside_their_values(operation, x, cache, slots, layout, *more):
    """The shape [page_size, D + 4] taken at its word."""
    if operation != "write_index" or not layout.is_fp8:
        return reference.run(operation, x, cache, slots, layout, *more)
    token, page, offset = reference.places(slots, layout.page_size)
    codes, scale = reference.quantize(x[token], layout.format, layout.scale)
    cache[page, offset] = torch.cat((codes.view(torch.uint8), scale[:, None].view(torch.uint8)), 1)
    return None


def with_quantize(monkeypatch, quantize):
    monkeypatch.setattr(reference, "quantize", quantize)
    return reference.run


def amax_with_infinities(x, format, kind):
    x = x.float()
    scale = x.abs().nan_to_num(0.0, posinf=3e38).amax(-1).clamp(min=1e-4) / 448
    return (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(reference.FP8[format]), scale


def without_a_floor(x, format, kind):
    codes, scale = QUANTIZE(x, format, kind)
    return codes, torch.where(x.float().abs().nan_to_num(0).amax(-1) < 1e-4, 1e-9, scale)


def multiplied_by_the_inverse(x, format, kind):
    _, scale = QUANTIZE(x, format, kind)
    largest = reference.LARGEST[format]
    return (x.float() * (1 / scale)[..., None]).clamp(-largest, largest).to(reference.FP8[format]), scale


def never_a_power_of_two(x, format, kind):
    return QUANTIZE(x, format, "float32")


def always_e4m3fn(x, format, kind):
    codes, scale = QUANTIZE(x, "e4m3fn", kind)
    return codes.view(reference.FP8[format]), scale


def half_the_scale(x, format, kind):
    codes, scale = QUANTIZE(x, format, kind)
    return codes, scale / 2


QUANTIZE = reference.quantize


@pytest.mark.parametrize(
    ("quantize", "lines"),
    [
        (amax_with_infinities, {INDEX, LATENT}),
        (without_a_floor, {INDEX, LATENT}),
        (multiplied_by_the_inverse, {INDEX, LATENT}),
        (never_a_power_of_two, {INDEX, LATENT}),
        (always_e4m3fn, {INDEX}),
        (half_the_scale, {INDEX, LATENT}),
    ],
)
def test_wrong_numbers_are_found(monkeypatch, quantize, lines):
    with_quantize(monkeypatch, quantize)
    assert set(check_cache("reference").failed) == lines


def skips_nothing(operation, x, cache, slots, layout, *more):
    """A negative slot counts from the end, as an index of Python does."""
    if operation.startswith("write"):
        total = cache.shape[0] * cache.shape[1]
        slots = torch.where(slots < 0, slots.remainder(total), slots)
    reference.run(operation, x, cache, slots, layout, *more)


def rotary_part_of_another_token(operation, x, cache, slots, layout, *more):
    if operation == "write_latent" and layout.rope_dim:
        x = torch.cat((x[:, : layout.value_dim], x[:, layout.value_dim :].roll(1, 0)), 1)
    reference.run(operation, x, cache, slots, layout, *more)


def clears_a_page(operation, x, cache, slots, layout, *more):
    if operation.startswith("write"):
        cache[slots[slots >= 0] // layout.page_size] = 0
    reference.run(operation, x, cache, slots, layout, *more)


def pages_without_gaps(operation, x, cache, slots, layout, *more):
    if operation.startswith("write") and layout.is_fp8:
        size = layout.page_size * layout.width
        cache = cache.as_strided(cache.shape, (size // 4 * 4 + 4, layout.width, 1))
    reference.run(operation, x, cache, slots, layout, *more)


def clears_the_rows_of_nobody(operation, *arguments):
    if operation == "gather_index":
        arguments[4].view(torch.uint8).zero_()
    reference.run(operation, *arguments)


def shifted_by_a_page(operation, cache, table, *arguments):
    if operation == "gather_index":
        table = table.roll(1, 1).clamp(max=cache.shape[0] - 1)
    reference.run(operation, cache, table, *arguments)


def junk_for_negative_slots(operation, cache, slots, *arguments):
    reference.run(operation, cache, slots.clamp(min=0) if operation == "gather_latent" else slots, *arguments)


def truncated(operation, *arguments):
    reference.run(operation, *arguments)
    if operation == "gather_latent" and (out := arguments[-1]).dtype == torch.float32:
        out.view(torch.int32).bitwise_and_(-2)


def other_every_time(operation, x, cache, slots, layout, *more):
    reference.run(operation, x, cache, slots, layout, *more)
    if operation.startswith("write"):
        cache.view(torch.uint8)[0, 0, 0] = torch.randint(256, (1,)).item()


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (scales_beside_their_values, INDEX),
        (rotary_part_of_another_token, LATENT),
        (skips_nothing, SLOTS),
        (clears_a_page, SLOTS),
        (pages_without_gaps, SLOTS),
        (clears_the_rows_of_nobody, OUTPUT),
        (shifted_by_a_page, GATHER),
        (junk_for_negative_slots, GATHER),
        (truncated, GATHER),
        (other_every_time, REPEAT),
    ],
)
def test_a_broken_kernel_is_found_in_its_line(monkeypatch, kernel, line):
    monkeypatch.setattr(dispatch, "_load", lambda entry: kernel)
    report = check_cache("reference")
    assert line in report.failed, str(report)
    assert "seed " in report.lines[line].first_failure


def test_a_call_that_is_not_refused_is_found(monkeypatch):
    monkeypatch.setattr(api.checks, "check_tokens", lambda *_: None)
    monkeypatch.setattr(dispatch, "_load", lambda entry: lambda *_: None)
    assert REFUSED in check_cache("reference").failed


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_the_table_of_bytes_is_torchs(name):
    every = torch.arange(256, dtype=torch.uint8).view(reference.FP8[name]).double()
    assert torch.equal(every.nan_to_num(7e7), torch.from_numpy(table(name)).nan_to_num(7e7))


def test_every_kernel_of_cache_is_judged():
    assert [name for name, _ in cache_kernels()] == [kernel.name for kernel in api.KERNELS]
    for name, unmet in cache_kernels():
        report = check_cache(None if unmet else name, seed=3)
        assert report.ok, str(report)
        assert set(report.lines) == set(LINES)
        assert not report.not_claimed


def test_a_kernel_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="kernel is 'fast'"):
        check_cache("fast")


def test_the_layouts_of_the_cases_are_all_that_there_are():
    from keysift.testing.cache import cases

    formats = {(type(layout), layout.format) for layout, _ in cases()}
    assert formats == {(IndexLayout, name) for name in ("e4m3fn", "e4m3fnuz", "float32", "bfloat16", "float16")} | {
        (LatentLayout, name) for name in ("e4m3fn", "float32", "bfloat16", "float16")
    }
