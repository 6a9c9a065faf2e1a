"""The read floor: how fast this machine reads the same scores once, measured in the same run as the kernels.

Several ways to read are tried; the fastest is the floor. On CUDA the ways are kernels of ours (`floor.cu`) compiled by
NVRTC, on a CPU a numba loop, serial and parallel, elsewhere torch's own maximum. What reads wrongly is refused.
"""

import functools
import importlib.resources
from collections.abc import Callable, Sequence

import numpy as np
import torch

from keysift.benchmarks.harness import Clock, Variant
from keysift.dispatch import device_of

#: (threads, words of 16 bytes that a thread has in flight), and blocks per multiprocessor in all.
SHAPES = ((256, 4), (512, 4), (512, 8), (1024, 4))
BLOCKS_PER_SM = (1, 2, 4, 8, 16)
PLACES = (0, 1, 2, 7, 8, 5000, 16_383, 20_000)  # columns that the check of the kernels plants a value in
WORDS = {4: ("unsigned int", torch.int32), 2: ("unsigned short", torch.int16)}


def fastest(clock: Clock, ways: Sequence[Variant]) -> Variant:
    """The way to read that is the floor of this case."""
    return min(ways, key=clock.glance) if len(ways) > 1 else ways[0]


def ways_to_read(scores: Sequence[torch.Tensor], ends: torch.Tensor) -> list[Variant]:
    """Variants that read the windows [0, ends[r]) of each of `scores` [rows, columns] once, named by how they do it."""
    kind = device_of(scores[0].device).type
    if kind == "cpu":
        return _cpu_ways(scores, ends)
    if kind == "cuda":
        return _cuda_ways(scores, ends)
    return [Variant("torch.amax, whole rows", lambda i: scores[i].amax(1))]


def _cpu_ways(scores: Sequence[torch.Tensor], ends: torch.Tensor) -> list[Variant]:
    serial, parallel = _cpu_readers()
    rows = ends.numel()
    words = [tensor.view(WORDS[tensor.element_size()][1]).numpy() for tensor in scores]
    limits = ends.numpy()
    wanted = [np.bitwise_xor.reduce(words[0][row, : limits[row]]) for row in range(rows)]
    variants = []
    for name, reader, parts in (
        ("serial", serial, 1),
        ("parallel", parallel, -(-torch.get_num_threads() // rows)),
    ):
        found = np.empty((rows, parts), dtype=words[0].dtype)
        reader(words[0], limits, found)
        if not np.array_equal(np.bitwise_xor.reduce(found, axis=1), wanted):
            raise RuntimeError(f"the {name} read floor does not read what it should")
        variants.append(Variant(name, _cpu_reader(reader, words, limits, found)))
    return variants


def _cpu_reader(
    reader: Callable[..., None], words: list[np.ndarray], ends: np.ndarray, found: np.ndarray
) -> Callable[[int], None]:
    return lambda i: reader(words[i], ends, found)


@functools.cache
def _cpu_readers() -> tuple[Callable[..., None], Callable[..., None]]:
    import numba

    def read(words, ends, found):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - numba types it
        rows, parts = found.shape
        for unit in numba.prange(rows * parts):
            row, part = unit // parts, unit % parts
            folded = 0
            for column in range(ends[row] * part // parts, ends[row] * (part + 1) // parts):
                folded ^= words[row, column]
            found[row, part] = folded

    return numba.njit(read), numba.njit(parallel=True)(read)


def _cuda_ways(scores: Sequence[torch.Tensor], ends: torch.Tensor) -> list[Variant]:
    device, size = scores[0].device, scores[0].element_size()
    rows = ends.numel()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = sorted({max(1, round(multiprocessors * blocks / rows)) for blocks in BLOCKS_PER_SM})
    _verify(device, size)
    return [
        Variant(_how(threads, unroll, split), _cuda_reader(scores, ends, threads, unroll, split))
        for threads, unroll in SHAPES
        for split in splits
    ]


def _how(threads: int, unroll: int, splits: int) -> str:
    return f"{threads} threads x {unroll}, {splits} blocks a row"


def _cuda_reader(
    scores: Sequence[torch.Tensor],
    ends: torch.Tensor,
    threads: int,
    unroll: int,
    splits: int,
    sink: torch.Tensor | None = None,
) -> Callable[[int], None]:
    """Launch on the stream that is current now. Kernel arguments are Python ints, which cuda-core passes as 64 bits."""
    from cuda.core import LaunchConfig, Stream, launch

    device, rows = scores[0].device, ends.numel()
    kernel = _cuda_kernels(device, scores[0].element_size())[threads, unroll]
    target = torch.zeros(rows * splits, dtype=torch.int32, device=device) if sink is None else sink
    stream = Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
    config = LaunchConfig(grid=rows * splits, block=threads)

    def read(i: int) -> None:
        pointers = scores[i].data_ptr(), ends.data_ptr()
        launch(stream, config, kernel, *pointers, scores[i].stride(0), splits, target.data_ptr())

    return read


@functools.cache
def _cuda_kernels(device: torch.device, element_size: int) -> dict[tuple[int, int], object]:
    """The kernels of floor.cu by (threads, unroll), compiled for this device. Needs the `cuda` extra."""
    from cuda.core import Device, Program, ProgramOptions

    Device(device.index).set_current()
    source = importlib.resources.files(__package__).joinpath("floor.cu").read_text()
    element = WORDS[element_size][0]
    names = {(t, u): f"select_floor_kernel<{element}, {t}, {u}>" for t, u in SHAPES}
    options = ProgramOptions(arch=device_of(device).arch, std="c++17")
    compiled = Program(source, "c++", options).compile("cubin", name_expressions=tuple(names.values()))
    return {shape: compiled.get_kernel(name) for shape, name in names.items()}


@functools.cache
def _verify(device: torch.device, element_size: int) -> None:
    """Every element inside a window is seen, none outside: plant a word of ones and look for the store."""
    columns, ends = 40_009, [40_009, 0, 20_517, 3]  # odd: rows begin at every alignment; long: loops are unrolled
    limits = torch.tensor(ends, dtype=torch.int32, device=device)
    words = torch.zeros(len(ends), columns, dtype=WORDS[element_size][1], device=device)
    for splits in (1, 3):
        sink = torch.zeros(len(ends), splits, dtype=torch.int32, device=device)
        for threads, unroll in SHAPES:
            read = _cuda_reader([words], limits, threads, unroll, splits, sink)
            how = f"the read floor ({_how(threads, unroll, splits)})"
            for row, end in enumerate(ends):
                words.zero_()
                words[row, end:] = -1
                sink.zero_()
                read(0)
                if sink.any():
                    raise RuntimeError(f"{how} reads past the window [0, {end})")
                for column in (c for c in (*PLACES, end - 2, end - 1) if 0 <= c < end):
                    words.zero_()
                    sink.zero_()
                    # Two 16-bit elements share a word, unless one of them is outside the window.
                    other = column + 1 - 2 * ((row * columns + column) % 2) if element_size == 2 else column
                    words[row, [column, other if 0 <= other < end else column]] = -1
                    read(0)
                    if not sink[row].any():
                        raise RuntimeError(f"{how} misses column {column} of the window [0, {end})")
