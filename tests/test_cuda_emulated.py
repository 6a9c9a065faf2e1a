"""The CUDA C++ kernels of select on a CPU, a fiber per thread (emulator/cuda_on_cpu.h): what they select."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")
COMPILER = shutil.which("g++")
if COMPILER is None:
    pytest.skip("needs g++ to build the emulator", allow_module_level=True)

import keysift  # noqa: E402
from keysift.ops.select import api, kernel_cuda  # noqa: E402
from keysift.ops.select.kernel_cuda import Variant  # noqa: E402
from keysift.testing import Selector, calls, check_select  # noqa: E402
from keysift.testing.cases import DTYPES, Case  # noqa: E402
from keysift.testing.inputs import DISTRIBUTIONS  # noqa: E402
from keysift.testing.selectors import FEATURES  # noqa: E402

EMULATOR = Path(__file__).parent / "emulator" / "cuda_on_cpu.h"
ENTRY = """
static const Arguments* arguments;
extern "C" void emulate(const Arguments* a, int rows, int dynamic_bytes) {
  arguments = a;
  emulator::dynamic_memory.resize(dynamic_bytes);
  for (int row = 0; row < rows; row++) {
    blockIdx.x = row;
    emulator::run(THREADS, [] { select_kernel(*arguments); });
  }
}
"""
# As few threads as a CTA may have: the histogram needs a divisor of 2048, the lists 32 values a thread at least.
WHOLE = Variant(whole=True, threads=64, slots=24)
LISTS = Variant(whole=False, threads=64, slots=8)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """variant, dtype -> the kernel as a function of this process."""
    folder, built = tmp_path_factory.mktemp("emulated"), {}

    def make(variant, dtype):
        if (variant, dtype) not in built:
            name = f"{variant.whole}-{variant.threads}-{variant.slots}-{DTYPES.index(dtype)}"
            source, library = folder / f"{name}.cpp", folder / f"{name}.so"
            source.write_text(variant.source + ENTRY)
            command = [
                COMPILER,
                "-std=c++17",
                "-O2",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-w",
                "-shared",
                "-fPIC",
            ]
            command += [f"-D{macro}={value}" for macro, value in kernel_cuda.macros(dtype, variant)]
            subprocess.run([*command, "-include", EMULATOR, source, "-o", library], check=True)
            built[variant, dtype] = ctypes.CDLL(library).emulate
        return built[variant, dtype]

    return make


@pytest.fixture
def emulated(build, monkeypatch):
    """keysift.select, which ends in an emulated kernel."""

    def use(variant):
        def run(scores, k, *arguments):
            *arguments, _ = arguments  # no workspace
            packed = kernel_cuda.pack(scores, k, *arguments)
            build(variant, scores.dtype)(packed, scores.shape[0], variant.most_shared_memory)

        def chosen(device, dtype, rows, columns, k, stride, threads, kernel):
            if stride != 1 and columns > 1:
                raise ValueError(f"column stride is {stride}, needs 1")
            return run, 0

        monkeypatch.setattr(api, "_chosen", chosen)
        return Selector("emulated", keysift.select, keysift.select_decode, keysift.select_prefill)

    return use


def holds(variant):
    """The cases that a variant is launched for."""

    def accepts(case):
        capacity = variant.threads * variant.slots
        return case.columns <= capacity if variant.whole else case.k <= capacity * 2 // 3

    return accepts


@pytest.mark.parametrize("variant", [WHOLE, LISTS], ids=["whole", "lists"])
def test_the_kit_passes(emulated, variant):
    report = check_select(
        emulated(variant), tier="tiny", accepts=holds(variant), features=FEATURES - {"workspace", "refusals"}
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("variant", [WHOLE, LISTS], ids=["whole", "lists"])
@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_the_kth_value_anywhere_in_a_row(emulated, variant, data):
    """At either end of the values and between them, in rows that begin and end off a granule."""
    case = Case(2, 600, 1, data, DTYPES[len(data) % 3], start=(0, 3), end=(600, 597))
    call = calls.build(case, torch.device("cpu"), seed=len(data))
    given = {"start": call.start, "end": call.end, "return_values": True}
    eligible = int((call.scores[1, 3:597] > -torch.inf).sum())
    ks = sorted({1, 2, 200, *(max(1, eligible - less) for less in (33, 2, 1, 0))})
    wanted = [by_column(*keysift.select(call.scores, k, **given, kernel="reference")) for k in ks]
    selector = emulated(variant)
    for k, right in zip(ks, wanted, strict=True):
        for is_sorted in (False, True):
            found = selector(call.scores, k, **given, sorted=is_sorted)
            for one, other in zip(by_column(*found), right, strict=True):
                assert torch.equal(one, other), f"k = {k}, sorted = {is_sorted}, {case}"


def by_column(columns, values):
    """In ascending order of columns, -1 first."""
    order = columns.sort(1).indices
    return columns.gather(1, order), values.gather(1, order)
