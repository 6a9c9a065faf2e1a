"""Score distributions by name, seeded, made on the device where they are used.

Most are ordinary; the others each meet one way in which a selection goes wrong: values that share every leading bit
of a radix digit, ties, both zeros, both signs of NaN, infinities, and padding values that outrank real ones.
"""

import zlib
from collections.abc import Callable

import torch

INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
#: Bit patterns of NaN: quiet and signalling, positive and negative.
_NANS = {
    torch.float32: (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF),
    torch.bfloat16: (0x7FC0, 0xFFC0, 0x7F81, 0xFFFF),
    torch.float16: (0x7E00, 0xFE00, 0x7C01, 0xFFFF),
}
#: A number whose low mantissa bits are free, and how many of them low_bits and ulp_ladder may use.
_BASE = {
    torch.float32: (0x3F900000, 10, 0x3F800000),
    torch.bfloat16: (0x3F90, 4, 0x3F80),
    torch.float16: (0x3C80, 6, 0x3C00),
}

Shape = tuple[int, int]
Maker = Callable[[Shape, torch.dtype, torch.Generator], torch.Tensor]


def generator(device: torch.device | str, seed: int, name: str) -> torch.Generator:
    """A generator that depends on the seed and on a name, and on nothing else."""
    return torch.Generator(device).manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)


def make(name: str, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Scores [rows, columns] of the distribution `name`, on the generator's device. KeyError for an unknown name."""
    return DISTRIBUTIONS[name]((rows, columns), dtype, generator)


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers taken as bit patterns of `dtype`; only their low 32 or 16 bits count."""
    width = 32 if dtype == torch.float32 else 16
    wrapped = bits.long() % 2**width
    signed = wrapped - (wrapped >> (width - 1)) * 2**width
    scores: torch.Tensor = signed.to(INTEGER[dtype]).view(dtype)
    return scores


def _normal(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=g, device=g.device, dtype=dtype)


def _uniform(shape: Shape, g: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=g, device=g.device)


def _integers(shape: Shape, high: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(high, shape, generator=g, device=g.device)


def _columns(shape: Shape, g: torch.Generator) -> torch.Tensor:
    return torch.arange(shape[1], device=g.device).expand(shape)


def _all_equal(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.full(shape, -0.75, device=g.device, dtype=dtype)


def _low_bits(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    base, free, _ = _BASE[dtype]
    return from_bits(base + _integers(shape, 1 << free, g), dtype)


def _ulp_ladder(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Neighbouring floats in shuffled order, all distinct in float32."""
    steps = min(shape[1], 1 << 23 if dtype == torch.float32 else 1 << 13)
    order = torch.randperm(max(shape[1], 1), generator=g, device=g.device)[: shape[1]]
    shifted = (order + torch.arange(shape[0], device=g.device)[:, None]) % max(steps, 1)
    return from_bits(_BASE[dtype][2] + shifted, dtype)


def _crowd(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Half of the row inside one quarter of a binade, a few above it, the rest below: rank k falls among the crowd."""
    draw, inside = _uniform(shape, g), 1 + 0.25 * _uniform(shape, g)
    return torch.where(draw < 0.53, inside, torch.where(draw < 0.97, draw - 0.5, 2 + draw)).to(dtype)


def _heavy_tailed(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """sum over heads of weight * relu(q . k), q and k in bfloat16: what an indexer really produces."""
    rows, columns = shape
    keys = torch.randn(columns, 64, generator=g, device=g.device).bfloat16().float()
    total = torch.zeros(shape, device=g.device)
    for _ in range(16):
        queries = torch.randn(rows, 64, generator=g, device=g.device).bfloat16().float()
        weights = torch.randn(rows, 1, generator=g, device=g.device)
        total += weights * (queries @ keys.T).relu_()
    return total.to(dtype)


def _with_nan(share: float) -> Maker:
    def maker(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        scores = _normal(shape, dtype, g)
        patterns = torch.tensor(_NANS[dtype], device=g.device)[_integers(shape, 4, g)]
        return torch.where(_uniform(shape, g) < share, from_bits(patterns, dtype), scores)

    return maker


def _nan_row(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """The middle row all NaN; in the others a NaN in the first, the middle or the last column."""
    scores = _normal(shape, dtype, g)
    places = torch.tensor([0, shape[1] // 2, shape[1] - 1], device=g.device)
    rows = torch.arange(shape[0] if shape[1] else 0, device=g.device)
    scores[rows, places[rows % 3]] = torch.nan
    scores[shape[0] // 2 :][:1] = -torch.nan
    return scores


def _specials(share: float) -> Maker:
    """Normal with `share` each of NaN, +inf and -inf."""

    def maker(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        scores, draw = _normal(shape, dtype, g), _uniform(shape, g)
        for step, special in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
            scores[(draw >= (step - 1) * share) & (draw < step * share)] = special
        return scores

    return maker


def _signed_zeros(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Both zeros at random, with a number of either sign here and there."""
    sign = _integers(shape, 2, g) * 2 - 1
    scores = torch.zeros(shape, device=g.device) * sign
    return torch.where(_uniform(shape, g) < 0.02, sign * 0.5, scores).to(dtype)


def _denormals(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    mantissa, width = {torch.float32: (23, 32), torch.bfloat16: (7, 16), torch.float16: (10, 16)}[dtype]
    return from_bits(_integers(shape, 1 << mantissa, g) | _integers(shape, 2, g) << (width - 1), dtype)


def _lowest(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """The lowest finite number and -inf, half each, and a few ordinary scores."""
    draw, scores = _uniform(shape, g), _normal(shape, dtype, g)
    scores[draw < 0.98] = -torch.inf
    scores[draw < 0.49] = torch.finfo(dtype).min
    return scores


def _few_finite(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """-inf but for three columns, one of them the lowest finite number."""
    scores = torch.full(shape, -torch.inf, device=g.device, dtype=dtype)
    for place, value in ((0, -2.0), (1, 0.5), (2, torch.finfo(dtype).min)):
        scores[:, place :: max(shape[1] // 3, 3)][:, :1] = value
    return scores


def _tie_distance(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Equal maxima at a distance of 1, 31, 32, 33, 63 or 64 columns, by row."""
    distance = torch.tensor([1, 31, 32, 33, 63, 64], device=g.device)[torch.arange(shape[0], device=g.device) % 6]
    return (_columns(shape, g) % distance[:, None] == 0).to(dtype)


def _bits(shape: Shape, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Every bit pattern is as likely as any other."""
    return from_bits(_integers(shape, 2**32, g), dtype)


DISTRIBUTIONS: dict[str, Maker] = {
    "normal": _normal,
    "uniform": lambda shape, dtype, g: _uniform(shape, g).to(dtype),
    "relu": lambda shape, dtype, g: _normal(shape, dtype, g).relu_(),
    "all_equal": _all_equal,
    "narrow": lambda shape, dtype, g: (1 + 1e-6 * torch.randn(shape, generator=g, device=g.device)).to(dtype),
    "band_10": lambda shape, dtype, g: (10 + 0.2 * _uniform(shape, g)).to(dtype),
    "low_bits": _low_bits,
    "ulp_ladder": _ulp_ladder,
    "ulp_ladder_negative": lambda shape, dtype, g: -_ulp_ladder(shape, dtype, g),
    "crowd": _crowd,
    "two_valued": lambda shape, dtype, g: _integers(shape, 2, g).to(dtype) - 1,
    "mod_64": lambda shape, dtype, g: (_columns(shape, g) % 64 / 64).to(dtype),
    "ascending": lambda shape, dtype, g: (_columns(shape, g) / max(shape[1], 1) - 0.5).to(dtype),
    "descending": lambda shape, dtype, g: (0.5 - _columns(shape, g) / max(shape[1], 1)).to(dtype),
    "heavy_tailed": _heavy_tailed,
    "nan_1": _with_nan(0.01),
    "nan_50": _with_nan(0.5),
    "nan_83": _with_nan(0.83),
    "nan_100": _with_nan(1.1),
    "nan_row": _nan_row,
    "specials": _specials(0.001),
    "infinities": _specials(0.3),
    "signed_zeros": _signed_zeros,
    "denormals": _denormals,
    "lowest": _lowest,
    "few_finite": _few_finite,
    "tie_distance": _tie_distance,
    "bits": _bits,
}
#: Distributions in which some scores are NaN or infinite, and those in which many are equal.
SPECIAL = frozenset(
    {"nan_1", "nan_50", "nan_83", "nan_100", "nan_row", "specials", "infinities", "lowest", "few_finite", "bits"}
)
TIED = frozenset({"relu", "all_equal", "two_valued", "mod_64", "signed_zeros", "tie_distance", "lowest", "low_bits"})
