"""Which kernel runs: the order of the table, the reasons, the name, the warning; never an exception."""

import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from keysift import dispatch
from keysift.dispatch import Device, Kernel
from keysift.ops.select import api

CPU = Device("cpu", "")
H200 = Device("cuda", "sm_90", is_local=False)
MI300 = Device("hip", "gfx942", is_local=False)


@dataclass(frozen=True, slots=True)
class Toy:
    """A problem of no stage, so that these tests stand when the stages change."""

    device: Device = CPU
    k: int = 8

    @property
    def kind(self) -> str:
        return f"toy on {self.device}"


def even(problem):
    return [] if problem.k % 2 == 0 else [f"k is {problem.k}, needs an even one"]


def small_cpu(problem):
    return [
        *([] if problem.device.type == "cpu" else [f"device is {problem.device}, needs cpu"]),
        *([] if problem.k <= 4 else [f"k is {problem.k}, needs at most 4"]),
    ]


def anything(problem):
    return []


def table(*rows):
    return tuple(Kernel(name, unmet, "keysift.ops.select.reference:run") for name, unmet in rows)


TOYS = table(("small", small_cpu), ("even", even), ("reference", anything))


def python(code, **environment):
    """A fresh process; its stdout."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("k", "expected"), [(4, "small"), (6, "even"), (7, "reference"), (3, "small")])
def test_the_first_kernel_without_unmet_constraints_runs(k, expected):
    assert dispatch.choose("toy", TOYS, Toy(k=k)).name == expected


def test_the_order_is_the_tables():
    assert dispatch.choose("toy", TOYS[::-1], Toy(k=4)).name == "reference"


def test_explain_lists_every_kernel_with_every_reason():
    assert dispatch.explain(TOYS, Toy(H200, k=7)) == [
        ("small", ["device is cuda:sm_90, needs cpu", "k is 7, needs at most 4"]),
        ("even", ["k is 7, needs an even one"]),
        ("reference", []),
    ]


def test_a_kernel_by_name_runs_although_another_comes_first():
    assert dispatch.choose("toy", TOYS, Toy(k=4), "reference").name == "reference"


def test_a_kernel_by_name_lists_every_unmet_constraint():
    with pytest.raises(ValueError, match=r"kernel 'small' cannot run this toy: device is .*needs cpu; k is 7, needs"):
        dispatch.choose("toy", TOYS, Toy(H200, k=7), "small")


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="kernel is 'fast'; toy has 'small', 'even', 'reference'"):
        dispatch.choose("toy", TOYS, Toy(), "fast")


def test_no_kernel_at_all_lists_every_kernel_with_its_reasons():
    with pytest.raises(ValueError, match="no kernel can run this toy") as error:
        dispatch.choose("toy", TOYS[:2], Toy(k=7))
    assert "  small: k is 7, needs at most 4" in str(error.value)
    assert "  even: k is 7, needs an even one" in str(error.value)


def test_an_exception_while_choosing_is_never_a_fallback():
    def broken(problem):
        raise ZeroDivisionError("a bug in a constraint")

    with pytest.raises(ZeroDivisionError):
        dispatch.choose("toy", table(("broken", broken), ("reference", anything)), Toy())


def test_an_exception_while_loading_or_running_is_never_a_fallback(monkeypatch, fresh_choices):
    absent = Kernel("absent", anything, "keysift.no_such_kernel:run")
    monkeypatch.setattr(api, "KERNELS", (absent, *api.KERNELS))
    with pytest.raises(ModuleNotFoundError, match="no_such_kernel"):
        api.select(torch.zeros(1, 4), 2)
    failing = Kernel("failing", anything, f"{__name__}:raises")
    monkeypatch.setattr(dispatch, "_load", lambda entry: raises)
    monkeypatch.setattr(api, "KERNELS", (failing, *api.KERNELS))
    with pytest.raises(RuntimeError, match="the kernel failed"):
        api.select(torch.zeros(1, 4), 2)


def raises(*arguments):
    raise RuntimeError("the kernel failed")


@pytest.mark.parametrize("device", [H200, MI300, Device("xpu", "")], ids=str)
def test_an_accelerator_that_falls_to_the_reference_warns_once_per_kind(fresh_choices, device):
    with pytest.warns(RuntimeWarning) as seen:
        dispatch.choose("toy", TOYS, Toy(device, k=7))
    (warning,) = seen
    message = str(warning.message)
    assert f"keysift.toy runs its reference for toy on {device}" in message
    assert f"  small: device is {device}, needs cpu; k is 7, needs at most 4" in message
    assert "  even: k is 7, needs an even one" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.choose("toy", TOYS, Toy(device, k=7))
        dispatch.choose("toy", TOYS, Toy(device, k=6))


def test_a_cpu_or_a_reference_by_name_does_not_warn(fresh_choices):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose("toy", TOYS, Toy(k=7)).name == "reference"
        assert dispatch.choose("toy", TOYS, Toy(H200, k=7), "reference").name == "reference"


def test_the_environment_names_a_kernel_and_is_read_once():
    code = """
import os, torch, keysift
from keysift.ops.select import api
from keysift import dispatch
problem = api.Problem(dispatch.parse_device("cpu"), torch.float32, 1, 8, 2)
print(dispatch.choose("select", api.KERNELS, problem).name, end=" ")
os.environ["KEYSIFT_SELECT"] = "cpu"
print(dispatch.choose("select", api.KERNELS, problem).name, end=" ")
print(dispatch.choose("select", api.KERNELS, problem, "cpu").name)
"""
    assert python(code, KEYSIFT_SELECT="reference") == "reference reference cpu"
    assert python(code) == "cpu cpu cpu"


def test_the_environment_is_no_request_that_can_be_ignored():
    code = """
import torch, keysift
try:
    keysift.select(torch.zeros(1, 4), 2)
except ValueError as error:
    print(error)
"""
    assert python(code, KEYSIFT_SELECT="fast").startswith("kernel is 'fast'; select has ")


@pytest.mark.parametrize("device", ["hip:gfx942", "cuda:sm_90", "cpu"])
def test_any_gpu_is_explained_without_it_and_without_importing_a_kernel(device):
    code = f"""
import sys, torch
from keysift import dispatch
from keysift.ops.select import api
problem = api.Problem(dispatch.parse_device({device!r}), torch.float32, 64, 131072, 2048)
print(len(dispatch.explain(api.KERNELS, problem)) == len(api.KERNELS))
print([name for name in ("triton", "numba", "cuda.core") if name in sys.modules])
"""
    assert python(code) == "True\n[]"


def test_a_device_that_is_only_named_has_the_packages_of_a_gpu_installation():
    assert MI300.has("triton")
    assert H200.has("cuda.core")
    assert not H200.has("no_such_package")
    local = replace(H200, is_local=True)
    assert local.has("torch")
    assert not local.has("no_such_package")
    assert not local.has("no_such_package.inner")


@pytest.mark.parametrize(
    ("text", "type", "arch"), [("cpu", "cpu", ""), ("cuda:sm_90", "cuda", "sm_90"), ("hip:gfx942", "hip", "gfx942")]
)
def test_a_device_from_words(text, type, arch):
    device = dispatch.parse_device(text)
    assert (device.type, device.arch, str(device)) == (type, arch, text)
    assert device.is_local == (text == "cpu")


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:gfx942", "hip:sm_90", "rocm:gfx942", "hip"])
def test_a_device_that_is_none(text):
    with pytest.raises(ValueError, match=f"device is '{text}'; it may be cpu"):
        dispatch.parse_device(text)


def test_the_reference_is_the_last_row_and_has_no_constraints():
    for device in (CPU, H200, MI300):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            problem = api.Problem(device, dtype, 3, 5, 7, column_stride=2)
            assert api.KERNELS[-1].name == "reference"
            assert not api.KERNELS[-1].unmet(problem)


def test_a_distribution_is_found_by_its_name():
    device = dispatch.parse_device("cpu")
    assert device.has("typing-extensions") or device.has("numpy")
    assert not device.has("no-such-distribution")
    assert not dispatch.parse_device("cuda:sm_90").has("typing-extensions")
