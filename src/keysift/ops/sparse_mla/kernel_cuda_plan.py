"""How sparse_mla is launched in CUDA C++, from static facts, without CUDA, so that any machine can ask."""

import functools
import math

#: Selected latents at a time, heads of a CTA, columns of the value: of the kernel.
TILE, HEADS, VALUES = 64, 64, 512
#: Bytes of shared memory of a CTA; so a processor has one.
SHARED = 226 << 10
#: A workspace may be any slice of bytes.
ALIGNMENT = 16
#: What starting a part and joining it costs, in tiles.
PART_COST = 2


@functools.lru_cache(maxsize=4096)
def parts(processors: int, rows: int, heads: int, k: int) -> int:
    """Into how many k is cut, so that the longest walk is shortest: waves of CTAs times the tiles of a part."""
    tiles, ctas = max(1, math.ceil(k / TILE)), max(1, rows * math.ceil(heads / HEADS))

    def cost(parts: int) -> int:
        each = math.ceil(tiles / parts) + (PART_COST if parts > 1 else 0)
        return math.ceil(ctas * parts / processors) * each

    return min((1 << power for power in range(tiles.bit_length())), key=cost)


def workspace(processors: int, rows: int, heads: int, k: int) -> int:
    """Bytes for the float32 output and lse of every part."""
    count = parts(processors, rows, heads, k)
    return 4 * count * rows * heads * (VALUES + 1) + ALIGNMENT if count > 1 else 0
