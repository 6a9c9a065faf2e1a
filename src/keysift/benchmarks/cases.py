"""What is timed: the cases, by name, and their scores.

The 118 cases of `every()` are those that peers were measured on (`peers_select_h200.json`, whose names these are).
"""

from dataclasses import dataclass

import torch

from keysift.testing import inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Names of the data, and what the conformance kit calls those that it makes too.
DATA = {
    "normal": "normal",
    "relu": "relu",
    "equal": None,
    "narrow": "narrow",
    "sorted": None,
    "heavy": "heavy_tailed",
    "nan1": "nan_1",
}
SETS = ("default", "all", "goals", "cpu")
SEED = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One shape with one kind of data."""

    phase: str  # "decode": every row valid to its end, next_n 1; "prefill": row i valid in [0, columns - rows + i + 1)
    rows: int
    columns: int
    k: int = 2048
    data: str = "normal"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """`decode-64x131072-k2048-normal`; the dtype follows where it is not float32."""
        dtype = "" if self.dtype == "float32" else f"-{self.dtype}"
        return f"{self.phase}-{self.rows}x{self.columns}-k{self.k}-{self.data}{dtype}"

    @property
    def has_nan(self) -> bool:
        """NaN among the scores, which `torch.topk` would rank first."""
        return self.data == "nan1"

    def ends(self, device: torch.device) -> torch.Tensor:
        """int32 [rows]: every row's window is [0, end)."""
        if self.phase == "decode":
            return torch.full((self.rows,), self.columns, dtype=torch.int32, device=device)
        ends = torch.arange(self.rows, dtype=torch.int32, device=device) + (self.columns - self.rows + 1)
        return ends.clamp(min=0)

    def scores(self, device: torch.device, number: int) -> torch.Tensor:
        """[rows, columns], the same for every run on one kind of device; `number` tells inputs of a case apart."""
        dtype, generator = DTYPES[self.dtype], inputs.generator(device, SEED + number, self.data)
        if self.data == "equal":
            return torch.full((self.rows, self.columns), 0.7311, dtype=dtype, device=device)
        made = inputs.make(DATA[self.data] or "normal", self.rows, self.columns, dtype, generator)
        return made.sort(1).values if self.data == "sorted" else made


def every() -> list[Case]:
    """All cases for which the figures of peers are recorded."""
    rows, columns = (1, 2, 4, 8, 16, 32, 64, 128, 256), (4096, 8192, 16384, 32768, 65536, 131072)
    some = ((1, 65536), (4, 131072), (16, 65536), (64, 32768), (64, 131072), (256, 8192), (256, 131072))
    prefill = (
        (1024, 131072),
        *_grid((2048,), (8192, 32768, 65536)),
        (4096, 16384),
        *_grid((8192,), (8192, 32768, 65536)),
    )
    return [
        *(Case("decode", *shape) for shape in _grid(rows, columns)),
        *(Case("decode", *shape, k) for k in (512, 1024) for shape in _grid((1, 16, 64, 256), (8192, 32768, 131072))),
        *(Case("decode", *shape, data=data) for data in ("equal", "narrow", "relu", "sorted") for shape in some),
        *(Case("prefill", *shape) for shape in prefill),
        *(Case("prefill", 2048, 32768, data=data) for data in ("equal", "narrow", "relu", "sorted")),
    ]


def goals() -> list[Case]:
    """What the project promises on a GPU: shapes, k of every kind, data of every kind."""
    return [
        *(Case("decode", *shape) for shape in _grid((1, 16, 64), (4096, 16384, 32768, 65536, 131072))),
        *(Case("decode", *shape) for shape in _grid((256,), (8192, 32768, 131072))),
        *(Case("prefill", *shape) for shape in _grid((2048, 8192), (8192, 32768, 65536))),
        *(Case("decode", *shape, k) for k in (512, 1000, 1024, 2047, 4096) for shape in ((1, 131072), (64, 65536))),
        *(Case("prefill", 2048, 32768, k) for k in (512, 1024, 2047, 4096)),
        *(Case("decode", *shape, data=data) for data in _ODD for shape in ((1, 131072), (64, 65536), (256, 32768))),
        *(Case("prefill", 2048, 32768, data=data) for data in _ODD),
        *(Case("decode", 64, 65536, dtype=dtype) for dtype in ("bfloat16", "float16")),
    ]


def gpu() -> list[Case]:
    """A minute's worth for a GPU."""
    return [
        *(Case("decode", *shape) for shape in _grid((1, 16, 64, 256), (8192, 32768, 131072))),
        *(Case("decode", 64, 131072, k) for k in (512, 1024)),
        *(Case("decode", 64, 131072, data=data) for data in ("equal", "narrow")),
        *(Case("prefill", *shape) for shape in ((2048, 8192), (2048, 32768), (8192, 8192))),
    ]


def cpu() -> list[Case]:
    """The two shapes that are promised on a CPU, with data of every kind, then short rows and small k."""
    promised = ((1, 131072), (64, 32768))
    return [
        *(Case("decode", *shape) for shape in promised),
        *(Case("decode", *shape, data=data) for data in _ODD for shape in promised),
        *(Case("decode", *shape, dtype=dtype) for dtype in ("bfloat16", "float16") for shape in promised),
        *(Case("decode", *shape, k) for k in (1, 8, 64, 512) for shape in promised),
        *(Case("decode", *shape) for shape in _grid((1, 64), (2048, 2049, 4096, 8192, 16384))),
        *(Case("decode", *shape, 16) for shape in _grid((1, 64), (16, 128, 1024))),
        *(Case("prefill", *shape) for shape in ((512, 512), (256, 8192))),
    ]


def case_set(name: str, device: torch.device) -> list[Case]:
    """The cases of one of SETS; `default` and `goals` are those of the device."""
    on_cpu = device.type == "cpu"
    made = {"all": every, "cpu": cpu, "goals": cpu if on_cpu else goals, "default": cpu if on_cpu else gpu}
    if name not in made:
        raise ValueError(f"set is {name!r}; it may be {', '.join(SETS)}")
    return made[name]()


_ODD = ("relu", "equal", "narrow", "sorted", "heavy", "nan1")


def _grid(rows: tuple[int, ...], columns: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(r, c) for r in rows for c in columns]
