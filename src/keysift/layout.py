"""How the bytes of a cache page are read: the formats of CONTRACT.md, Caches. Every stage knows them, none guesses.

A cache is a tensor [pages, page_size, width]; pages may lie apart (a pool shared with other layers), the inside of a
page may not. What the bytes mean is not in the tensor, so it travels beside it, as one of the two objects here.
"""

from dataclasses import dataclass

import torch

from keysift.checks import check_positive

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
#: What the largest magnitude of a token is scaled to. e4m3fnuz reaches 240; 224 is what MI300 caches are written with.
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}
#: The least amax that a scale is made from.
FLOOR = 1e-4
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALES = ("float32", "ue8m0")


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The format of a cache of index keys.

    format       "e4m3fn" (NVIDIA, MI350), "e4m3fnuz" (MI300), or a plain "bfloat16", "float16", "float32"
    page_size    tokens per page
    head_dim     D, a multiple of 4 for the fp8 formats
    scale        of the fp8 formats: "float32", or "ue8m0", rounded up to a power of two
    page_stride  elements from one page to the next; None: whatever the cache has

    An fp8 page is uint8 [page_size, D + 4] in shape alone: all page_size * D values lie first, then all page_size
    scales. Raises ValueError for a format, size or scale that does not exist.

    >>> IndexLayout("e4m3fn", page_size=64).width, IndexLayout("bfloat16", page_size=64).width
    (132, 128)
    """

    format: str = "e4m3fn"
    page_size: int = 64
    head_dim: int = 128
    scale: str = "float32"
    page_stride: int | None = None

    def __post_init__(self) -> None:
        _check_format(self.format, (*FP8, *PLAIN))
        check_positive(page_size=self.page_size, head_dim=self.head_dim)
        _check_stride(self.page_stride)
        _check_scale(self.scale)
        if self.is_fp8 and self.head_dim % 4:
            raise ValueError(f"head_dim is {self.head_dim}; an fp8 page needs a multiple of 4, or its scales lie askew")

    @property
    def is_fp8(self) -> bool:
        """True where a token has a scale."""
        return self.format in FP8

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cache tensor."""
        return torch.uint8 if self.is_fp8 else PLAIN[self.format]

    @property
    def width(self) -> int:
        """The last dimension of the cache tensor."""
        return self.head_dim + 4 if self.is_fp8 else self.head_dim

    def empty(self, pages: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new cache of `pages` pages, contiguous, not filled."""
        return _empty(pages, self.page_size, self.width, self.page_stride, self.dtype, device)

    def check(self, cache: torch.Tensor) -> None:
        """Raise TypeError or ValueError if `cache` cannot be of this layout."""
        _check_cache(self, cache, self.page_size, self.width, self.page_stride, self.is_fp8)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values [pages, page_size, D] and the scales [pages, page_size] (None: there are none), without a copy."""
        if not self.is_fp8:
            return cache, None
        size = self.page_size
        flat = _regular(cache).flatten(1)
        values = flat[:, : size * self.head_dim].view(FP8[self.format]).unflatten(1, (size, self.head_dim))
        return values, flat[:, size * self.head_dim :].view(torch.float32)


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """The format of a cache of latents (the compressed keys and values of MLA).

    format       "e4m3fn": per token value_dim fp8 values, a float32 scale for each 128 of them, then rope_dim bfloat16
                 (656 bytes in V3.2); or a plain "bfloat16", "float16", "float32" of value_dim + rope_dim numbers
    page_size    tokens per page
    value_dim    of the latent, 512 in V3.2 and GLM-5; a multiple of 128 for "e4m3fn"
    rope_dim     of the rotary part, 64
    scale        of the fp8 format: "float32", or "ue8m0", rounded up to a power of two: a value times that has the few
                 digits of fp8, so that bfloat16 holds it
    page_stride  elements from one page to the next; None: whatever the cache has

    Raises ValueError for a format, size or scale that does not exist.

    >>> LatentLayout("e4m3fn").width, LatentLayout("bfloat16").width
    (656, 576)
    """

    format: str = "bfloat16"
    page_size: int = 64
    value_dim: int = 512
    rope_dim: int = 64
    scale: str = "float32"
    page_stride: int | None = None

    def __post_init__(self) -> None:
        _check_format(self.format, ("e4m3fn", *PLAIN))
        check_positive(page_size=self.page_size, value_dim=self.value_dim)
        _check_stride(self.page_stride)
        _check_scale(self.scale)
        if isinstance(self.rope_dim, bool) or not isinstance(self.rope_dim, int):
            raise TypeError(f"rope_dim is {self.rope_dim!r}; it must be an int")
        if self.rope_dim < 0:
            raise ValueError(f"rope_dim is {self.rope_dim}; it must be at least 0")
        if self.is_fp8 and (self.value_dim % TILE or self.rope_dim % 2):
            raise ValueError(
                f"value_dim and rope_dim are {self.value_dim} and {self.rope_dim}; an e4m3fn token has whole tiles of "
                f"{TILE} values, and an even number of rotary ones"
            )

    @property
    def is_fp8(self) -> bool:
        """True where tiles of a token have scales."""
        return self.format in FP8

    @property
    def dim(self) -> int:
        """Numbers per token, value and rotary part."""
        return self.value_dim + self.rope_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cache tensor."""
        return torch.uint8 if self.is_fp8 else PLAIN[self.format]

    @property
    def width(self) -> int:
        """The last dimension of the cache tensor."""
        return self.value_dim + self.value_dim // TILE * 4 + 2 * self.rope_dim if self.is_fp8 else self.dim

    def empty(self, pages: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new cache of `pages` pages, not filled."""
        return _empty(pages, self.page_size, self.width, self.page_stride, self.dtype, device)

    def check(self, cache: torch.Tensor) -> None:
        """Raise TypeError or ValueError if `cache` cannot be of this layout."""
        _check_cache(self, cache, self.page_size, self.width, self.page_stride, self.is_fp8)

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """An e4m3fn cache as values [.., value_dim], scales [.., value_dim / 128] and rope [.., rope_dim], no copy."""
        scales, cache = self.value_dim + self.value_dim // TILE * 4, _regular(cache)
        return (
            cache[..., : self.value_dim].view(FP8[self.format]),
            cache[..., self.value_dim : scales].view(torch.float32),
            cache[..., scales:].view(torch.bfloat16),
        )


#: Values of a latent that share a scale.
TILE = 128


def take(values: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """values[index], by the bytes where the values are fp8, which torch does not index."""
    return values[index] if values.element_size() > 1 else values.view(torch.uint8)[index].view(values.dtype)


def _check_format(format: str, known: tuple[str, ...]) -> None:
    if format not in known:
        raise ValueError(f"format is {format!r}; it may be {', '.join(map(repr, known))}")


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; it may be {', '.join(map(repr, SCALES))}")


def _check_stride(page_stride: int | None) -> None:
    if page_stride is not None:
        check_positive(page_stride=page_stride)


def _empty(
    pages: int, page_size: int, width: int, stride: int | None, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    if stride is None or stride == page_size * width:
        return torch.empty(pages, page_size, width, dtype=dtype, device=device)
    pool = torch.empty(pages * stride, dtype=dtype, device=device)
    return pool.as_strided((pages, page_size, width), (stride, width, 1))


def _regular(cache: torch.Tensor) -> torch.Tensor:
    """A cache with the strides that its pages call for: of a dimension of 1 a tensor may have any, and views refuse."""
    pages, size, width = cache.shape
    return cache.as_strided(cache.shape, (cache.stride(0) if pages > 1 else size * width, width, 1))


def _check_cache(
    layout: object, cache: torch.Tensor, page_size: int, width: int, page_stride: int | None, is_fp8: bool
) -> None:
    dtype: torch.dtype = layout.dtype  # type: ignore[attr-defined]
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"cache is {type(cache).__name__}; it must be a torch.Tensor")
    if cache.dtype != dtype:
        raise TypeError(f"cache is {cache.dtype}; {layout} is {dtype}")
    if cache.ndim != 3 or cache.shape[1:] != (page_size, width):
        raise ValueError(f"cache has shape {list(cache.shape)}; {layout} is [pages, {page_size}, {width}]")
    stride = cache.stride()
    if (page_size > 1 and stride[1] != width) or stride[2] != 1:
        raise ValueError(f"cache has strides {list(stride)}; the inside of a page must be contiguous: [.., {width}, 1]")
    several = cache.shape[0] > 1
    if several and page_stride is not None and stride[0] != page_stride:
        raise ValueError(f"cache has pages {stride[0]} elements apart; {layout} has them {page_stride} apart")
    if several and stride[0] < page_size * width:
        raise ValueError(f"cache has pages {stride[0]} elements apart; a page has {page_size * width}")
    offset = 0 if torch.compiler.is_compiling() else cache.storage_offset()  # a trace does not know it
    if is_fp8 and ((several and stride[0] % 4) or offset % 4):
        raise ValueError(
            f"cache begins at byte {offset} with pages {stride[0]} bytes apart; both must be multiples of 4, for its "
            "float32 scales"
        )
