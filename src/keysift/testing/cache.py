"""`check_cache`: a kernel of cache against bytes placed one by one, by the lines of CONTRACT.md.

What is right is made in numpy from the definitions of the formats: a table of all bytes, the nearest of them, ties to
the even one. Neither torch's conversions to fp8 nor the views of a layout take part.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch

from keysift import dispatch
from keysift.layout import FP8, TILE, IndexLayout, LatentLayout
from keysift.ops.cache import api, gather_index_cache, gather_latent_cache, write_index_cache, write_latent_cache

from .report import Line, Report

INDEX = "cache 1: index keys, byte by byte"
LATENT = "cache 2: latents, byte by byte"
SLOTS = "cache 3: the slots given and nothing else"
GATHER = "cache 4: what is gathered"
OUTPUT = "cache 4: rows of no request, output views"
REFUSED = "refused input"
REPEAT = "every operation: same bytes on every run"
LINES = (INDEX, LATENT, SLOTS, GATHER, OUTPUT, REFUSED, REPEAT)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Bytes before a pool, and between and behind its pages.
GAP = 16

Layout = IndexLayout | LatentLayout
Bytes = np.ndarray  # uint8


def cases() -> list[tuple[Layout, torch.dtype]]:
    """Layouts and the dtype of what is written: every format, scale and dtype, page sizes even and odd."""
    plain = [(name, dtype) for name in ("float32", "bfloat16", "float16") for dtype in FLOATS]
    return [
        *((IndexLayout(name, 4, 24, "float32"), dtype) for name in FP8 for dtype in FLOATS),
        *((IndexLayout(name, 3, 5), dtype) for name, dtype in plain),
        *((IndexLayout(name, size, 128, "ue8m0"), torch.bfloat16) for name in FP8 for size in (1, 7, 64)),
        *((LatentLayout("e4m3fn", 2, 128, 6), dtype) for dtype in FLOATS),
        *((LatentLayout(name, 3, 6, 3), dtype) for name, dtype in plain),
        (LatentLayout("e4m3fn", 5, 256, 0), torch.bfloat16),
        *((LatentLayout("e4m3fn", 64, scale=scale), torch.bfloat16) for scale in ("float32", "ue8m0")),
    ]


def cache_kernels(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """Every kernel of cache by name, with what it lacks on `device`; nothing: it can be judged.

    >>> dict(cache_kernels("cpu"))["reference"]
    []
    """
    facts = dispatch.device_of(torch.device(device))
    return dispatch.explain(api.KERNELS, api.Problem(facts, "write_index", "e4m3fn", 12, 128))


def check_cache(kernel: str | None = None, device: torch.device | str = "cpu", seed: int = 0) -> Report:
    """Judge a kernel of cache, by name or the one that is chosen, and report line by line.

    Tokens hold magnitudes from 1e-6 to 1e5, zeros, NaN and infinities. Whole pools are compared byte for byte, with
    what lies before, between and behind the pages; each write runs three times, over two different junks. Tables hold
    junk where no request reaches. Raises ValueError for a kernel that does not exist or cannot run on `device`.

    >>> check_cache("reference").ok
    True
    """
    report = Report(f"cache {kernel or 'as chosen'}", seed, f"on {torch.device(device)}")
    report.lines = {name: Line(name) for name in LINES}
    for number, (layout, dtype) in enumerate(cases()):
        own = INDEX if isinstance(layout, IndexLayout) else LATENT
        found = dict(_findings(layout, dtype, kernel, torch.device(device), seed + number))
        for name in (own, *LINES[2:]):
            report.lines[name].count(found.get(name, ""), f"seed {seed + number}, {dtype} to {layout}")
    return report


def _findings(
    layout: Layout, dtype: torch.dtype, kernel: str | None, device: torch.device, seed: int
) -> Iterator[tuple[str, str]]:
    """What a kernel breaks, by line."""
    generator = torch.Generator().manual_seed(seed)
    index = isinstance(layout, IndexLayout)
    write, width = (write_index_cache, layout.head_dim) if index else (write_latent_cache, layout.dim)  # type: ignore[union-attr]
    x = _tokens(12, width, generator).to(dtype)
    pages = -(-16 // layout.page_size) + 1
    total = pages * layout.page_size
    slots = torch.randperm(total, generator=generator)[:12]
    slots[-1] = total - 1 if total - 1 not in slots else slots[-1]
    slots[3], slots[7] = -1, -(2**40)
    left = []
    for fill in (0x55, 0xAA, 0x55):
        pool, cache = _pool(layout, pages, fill, device)
        write(x.to(device), cache, slots.to(device), layout, kernel=kernel)  # type: ignore[arg-type]
        left.append(pool.cpu().numpy())
        right, named = _written(layout, pages, fill, x, slots)
        off = left[-1] != right
        if (off & named).any():
            place = int(np.argmax(off & named))
            yield (INDEX if index else LATENT), f"byte {place} is {left[-1][place]:#x}, not {right[place]:#x}"
        if (off & ~named).any():
            yield SLOTS, f"byte {int(np.argmax(off & ~named))}, of no slot that was given, was written"
    if (left[0] != left[2]).any():
        yield REPEAT, "a second write leaves other bytes"
    right, _ = _written(layout, pages, 0x55, x, slots)
    pool, cache = _pool(layout, pages, 0x55, device)
    pool.copy_(torch.from_numpy(right))
    if isinstance(layout, IndexLayout):
        yield from _gathered_keys(layout, cache, right, kernel, generator)
    else:
        yield from _gathered_latents(layout, cache, right, slots, kernel)
    yield from _refused(layout, x.to(device), slots.to(device), kernel, write)


def _gathered_keys(
    layout: IndexLayout, cache: torch.Tensor, pool: Bytes, kernel: str | None, generator: torch.Generator
) -> Iterator[tuple[str, str]]:
    device, pages, size = cache.device, cache.shape[0], layout.page_size
    lengths = [min(2 * size + 1, pages * size), 0, 1]
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in lengths]).int()
    reached = torch.arange(pages) * size < torch.tensor(lengths)[:, None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(ends[-1]) + 2
    dtype = FP8.get(layout.format, layout.dtype)
    out = torch.empty(tokens + 2, layout.head_dim, dtype=dtype, device=device)
    out.view(torch.uint8).fill_(0x33)
    scale = torch.full((tokens + 2, 2), 7.0, device=device)[:, 0] if layout.is_fp8 else None
    gather_index_cache(
        cache, table.where(reached, 2**31 - 1).to(device), ends.to(device), tokens, layout, out=out[1:-1],
        out_scale=None if scale is None else scale[1:-1], kernel=kernel,
    )  # fmt: skip
    found, row = out.view(torch.uint8).cpu().numpy(), 1
    for request, length in enumerate(lengths):
        for position in range(length):
            slot = int(table[request, position // size]) * size + position % size
            first, _, scale_at = _places(layout, slot)
            if (found[row] != pool[first : first + found.shape[1]]).any():
                yield GATHER, f"row {row - 1} is not position {position} of request {request}"
            if scale is not None and scale[row : row + 1].cpu().numpy().tobytes() != pool[scale_at:][:4].tobytes():
                yield GATHER, f"the scale of row {row - 1} is not that of position {position} of request {request}"
            row += 1
    if (found[row:] != 0x33).any() or (found[0] != 0x33).any():
        yield OUTPUT, "a row of out that belongs to no request was written"
    if scale is not None and ((scale[row:] != 7.0).any() or scale[0] != 7.0):
        yield OUTPUT, "a scale that belongs to no request was written"


def _gathered_latents(
    layout: LatentLayout, cache: torch.Tensor, pool: Bytes, slots: torch.Tensor, kernel: str | None
) -> Iterator[tuple[str, str]]:
    for dtype in FLOATS:
        out = torch.full((len(slots) + 2, layout.dim + 3), 7.0, dtype=dtype, device=cache.device)
        gather_latent_cache(
            cache, slots.to(cache.device), layout, dtype=dtype, out=out[1:-1, 1 : 1 + layout.dim], kernel=kernel
        )  # fmt: skip
        inside = torch.zeros_like(out, dtype=torch.bool)
        inside[1:-1, 1 : 1 + layout.dim] = True
        if (out[~inside] != 7.0).any():
            yield OUTPUT, "what lies beside out was written"
        found = out[1:-1, 1 : 1 + layout.dim].cpu()
        for row, slot in enumerate(slots.tolist()):
            numbers = _numbers(layout, pool, slot) if slot >= 0 else torch.zeros(layout.dim)
            wanted = numbers.to(dtype)
            if not bool(((found[row] == wanted) | (found[row].isnan() & wanted.isnan())).all()):
                yield GATHER, f"row {row}, slot {slot}, is not what the cache holds, as {dtype}"


def _refused(
    layout: Layout, x: torch.Tensor, slots: torch.Tensor, kernel: str | None, write: object
) -> Iterator[tuple[str, str]]:
    """A cache of another width, tokens of another width and slots that are no integers, each named; nothing written."""
    pool, cache = _pool(layout, 4, 0x55, x.device)
    for argument, arguments in (
        ("cache", (x, cache[..., 1:], slots)),
        ("k" if isinstance(layout, IndexLayout) else "latent", (x[:, 1:], cache, slots)),
        ("slot_mapping", (x, cache, slots.float())),
    ):
        try:
            write(*arguments, layout, kernel=kernel)  # type: ignore[operator]
        except (ValueError, TypeError) as error:
            if not str(error).startswith(f"{argument} "):
                yield REFUSED, f"the refusal does not name {argument}: {error}"
        else:
            yield REFUSED, f"a wrong {argument} was not refused"
    if (pool != 0x55).any():
        yield REFUSED, "a refused call has written"


def _tokens(count: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of every magnitude; one of zeros, one with NaN, one with infinities, one with ties, one nearly nothing."""
    x = torch.randn(count, width, generator=generator) * torch.logspace(-6, 5, count)[:, None]
    x[2] = 0.0
    x[4, 1], x[5, 0], x[5, -1] = -torch.nan, torch.inf, -torch.inf
    # Middles between two bytes, times a scale without an exact inverse: a quotient an ulp off is another byte.
    place = torch.arange(width)
    x[6] = (17 + 2 * (place % 8)) / 8 * 2.0 ** (place % 5) * (torch.tensor(3.7) / 448)
    x[6, 0] = 3.7
    x[9] = -1e-8
    x[9, 0] = 224.0
    return x


def _page_bytes(layout: Layout) -> int:
    return layout.page_size * layout.width * layout.dtype.itemsize


def _pool(layout: Layout, pages: int, fill: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and a cache in them whose pages lie apart."""
    stride = _page_bytes(layout) // GAP * GAP + 2 * GAP
    pool = torch.full((GAP + pages * stride,), fill, dtype=torch.uint8, device=device)
    item = layout.dtype.itemsize
    shape, strides = (pages, layout.page_size, layout.width), (stride // item, layout.width, 1)
    return pool, pool.view(layout.dtype).as_strided(shape, strides, GAP // item)


def _places(layout: Layout, slot: int) -> tuple[int, int, int]:
    """Bytes of a pool at which a slot's values begin, end, and its scales begin (CONTRACT.md, cache 1 and 2)."""
    page, offset = divmod(slot, layout.page_size)
    page_at = GAP + page * (_page_bytes(layout) // GAP * GAP + 2 * GAP)
    if not layout.is_fp8:
        size = layout.width * layout.dtype.itemsize
        first = page_at + offset * size
        return first, first + size, first + size
    if isinstance(layout, IndexLayout):
        first = page_at + offset * layout.head_dim
        return first, first + layout.head_dim, page_at + layout.page_size * layout.head_dim + 4 * offset
    first = page_at + offset * layout.width
    return first, first + layout.value_dim, first + layout.value_dim


def _written(layout: Layout, pages: int, fill: int, x: torch.Tensor, slots: torch.Tensor) -> tuple[Bytes, Bytes]:
    """The pool after a write, byte by byte, and which of its bytes belong to a slot that was given."""
    pool = _pool(layout, pages, fill, torch.device("cpu"))[0].numpy()
    named = np.zeros(len(pool), bool)
    for token, slot in zip(x, slots.tolist(), strict=True):
        if slot < 0:
            continue
        first, _, scales = _places(layout, slot)
        if not layout.is_fp8:
            parts = [(first, _rounded(token, layout.dtype).view(torch.uint8).numpy())]
        else:
            values = token if isinstance(layout, IndexLayout) else token[: layout.value_dim]
            tile = TILE if isinstance(layout, LatentLayout) else len(values)
            made = [_fp8(part.float().numpy(), layout.format, layout.scale) for part in values.split(tile)]
            scale = np.array([scale for _, scale in made], np.float32).view(np.uint8)
            rope = _rounded(token[len(values) :], torch.bfloat16).view(torch.uint8).numpy()
            parts = [(first, np.concatenate([code for code, _ in made])), (scales, scale)]
            parts += [(scales + len(scale), rope)] if len(rope) else []
        for place, data in parts:
            pool[place : place + len(data)] = data
            named[place : place + len(data)] = True
    return pool, named


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in a dtype of theirs or another; there, NaN is the quiet one."""
    return x.contiguous() if x.dtype == dtype else torch.where(x.isnan(), torch.nan, x).to(dtype).masked_fill(
        x.isnan(), torch.nan
    )  # fmt: skip


def table(format: str) -> np.ndarray:
    """What each of the 256 bytes means, float64.

    >>> table("e4m3fn")[0x7E], table("e4m3fnuz")[0x7F], table("e4m3fnuz")[0x80]
    (np.float64(448.0), np.float64(240.0), np.float64(nan))
    """
    bias = 7 if format == "e4m3fn" else 8
    meaning = np.empty(256)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - bias)
        meaning[byte] = -size if byte > 127 else size
    meaning[[0x7F, 0xFF] if format == "e4m3fn" else [0x80]] = np.nan
    return meaning


def _fp8(x: np.ndarray, format: str, kind: str) -> tuple[Bytes, np.float32]:
    """Bytes and scale of the float32 numbers of one token or tile."""
    largest = np.float32(448 if format == "e4m3fn" else 224)
    finite = np.abs(x[np.isfinite(x)])
    scale = np.maximum(finite.max(initial=0), np.float32(1e-4)) / largest
    if kind == "ue8m0":
        fraction, exponent = math.frexp(float(scale))
        scale = np.float32(math.ldexp(1.0, exponent - (fraction == 0.5)))
    quotient = x / scale  # float32
    meaning = table(format)[:128]
    meaning = meaning[meaning <= largest]
    size = np.minimum(np.abs(np.nan_to_num(quotient, nan=0.0, posinf=np.inf)).astype(np.float64), float(largest))
    above = np.searchsorted(meaning, size)  # the first byte that means `size` or more
    below = np.maximum(above - 1, 0)
    nearer = np.sign((size - meaning[below]) - (meaning[above] - size))  # above 0: the upper one
    code = np.where((nearer > 0) | ((nearer == 0) & (above % 2 == 0)), above, below)
    negative = np.signbit(quotient) & ((format == "e4m3fn") | (code > 0))
    code = code | np.where(negative, 0x80, 0)
    code[np.isnan(x)] = 0x7F if format == "e4m3fn" else 0x80
    return code.astype(np.uint8), scale


def _numbers(layout: LatentLayout, pool: Bytes, slot: int) -> torch.Tensor:
    """What a slot of a pool of latents means."""
    first, last, scales = _places(layout, slot)
    if not layout.is_fp8:
        return torch.from_numpy(pool[first:last]).view(layout.dtype)
    tiles = layout.value_dim // TILE
    scale = pool[scales : scales + 4 * tiles].view(np.float32)
    values = table(layout.format)[pool[first:last]].astype(np.float32) * np.repeat(scale, TILE)
    rope = torch.from_numpy(pool[scales + 4 * tiles : first + layout.width].view(np.int16)).view(torch.bfloat16)
    return torch.cat((torch.from_numpy(values), rope.float()))
