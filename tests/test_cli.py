"""The command line: what it says, what it refuses, and its exit codes."""

import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from keysift import dispatch
from keysift.__main__ import app
from keysift.ops.cache import api as cache_api
from keysift.ops.score import api as score_api
from keysift.ops.select import api as select_api
from keysift.ops.select import reference
from keysift.ops.sparse_mla import api as sparse_mla_api
from keysift.testing import cache as cache_kit
from keysift.testing import sparse_mla as sparse_mla_kit
from keysift.testing.lines import LINES

TABLES = {
    "cache": cache_api.KERNELS,
    "score": score_api.KERNELS,
    "select": select_api.KERNELS,
    "sparse_mla": sparse_mla_api.KERNELS,
}


def run(*words):
    return CliRunner().invoke(app, words, prog_name="keysift")


def rows(text):
    """The kernels that `explain` lists: {name: (chosen, reason)}."""
    found = {}
    for line in text.splitlines()[1:]:
        mark = line[:3]
        if mark in ("-> ", "   "):
            name, _, reason = line[3:].partition("  ")
            found[name.strip()] = (mark == "-> ", reason.strip())
    return found


def test_no_command_shows_the_commands():
    shown = run().output
    for verb in ("demo", "explain", "check", "bench"):
        assert f" {verb} " in shown


@pytest.mark.parametrize("stage", TABLES)
@pytest.mark.parametrize("device", ["cpu", "cuda:sm_90", "hip:gfx942"])
def test_explain_lists_every_kernel_once_and_marks_the_one_that_runs(stage, device):
    done = run("explain", stage, "--device", device)
    assert done.exit_code == 0, done.output
    listed = rows(done.output)
    assert list(listed) == [kernel.name for kernel in TABLES[stage]]
    chosen = [name for name, (is_chosen, _) in listed.items() if is_chosen]
    assert len(chosen) == 1
    assert listed[chosen[0]][1].startswith("runs: ")
    for name, (is_chosen, reason) in listed.items():
        assert is_chosen or reason.startswith(("no: ", "could run, but ")), name
    assert (f"{device} is only named: {', '.join(dispatch.GPU_PACKAGES)} count as installed" in done.output) == (
        device != "cpu"
    )


def test_explain_gives_the_dispatchs_own_reasons():
    shape = ("--rows", "64", "--columns", "131072", "--k", "2048", "--dtype", "float32", "--device", "cuda:sm_90")
    done = run("explain", "select", *shape)
    assert done.output.startswith("select: 64 x 131072, k = 2048, float32, on cuda:sm_90\n")
    problem = select_api.Problem(dispatch.parse_device("cuda:sm_90"), torch.float32, 64, 131072, 2048)
    listed = rows(done.output)
    for name, unmet in dispatch.explain(select_api.KERNELS, problem):
        assert (listed[name][1] == "no: " + "; ".join(unmet)) == bool(unmet)


def test_explain_says_when_an_accelerator_gets_the_reference():
    done = run("explain", "score", "--device", "hip:gfx942")
    assert "-> reference" not in done.output or "The reference is far slower than a kernel" in done.output
    assert "far slower" not in run("explain", "score").output


def test_explain_shows_what_a_column_stride_costs():
    listed = rows(run("explain", "select", "--column-stride", "2").output)
    assert listed["cpu"] == (False, "no: column stride is 2, needs 1")
    assert listed["reference"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "select", "--device", "gpu"), "device is 'gpu'; it may be cpu"),
        (("explain", "select", "--dtype", "int8"), "'int8' is not one of"),
        (("explain", "select", "--k", "0"), "greater than or equal to 1"),
        (("explain", "select", "--rows", "-1"), "greater than or equal to 0"),
        (("explain", "select", "--rows", "many"), "--rows"),
        (("explain", "topk"), "No such command 'topk'"),
        (("explain", "select", "--heads", "3"), "No such option"),
        (("check", "--tier", "huge"), "'huge' is not one of"),
        (("check", "--kernel", "fast"), "kernel is 'fast'; select has"),
        (("check", "--device", "tpu"), "device is 'tpu'; here it may be cpu"),
        (("bench", "select", "--frob"), "No such option"),
        (("demo", "--frob"), "No such option"),
        (("frob",), "No such command 'frob'"),
    ],
    ids=" ".join,
)
def test_bad_options_are_named_and_exit_with_2(words, message):
    done = run(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_check_shows_every_line_and_exits_with_0():
    done = run("check", "--tier", "tiny", "--device", "cpu", "--kernel", "reference", "--stage", "select")
    assert done.exit_code == 0, done.output
    assert "reference: keeps the contract (tier tiny, seed 0)" in done.output
    for line in LINES:
        assert re.search(rf"{re.escape(line)} +│ passed [1-9]", done.output), line
    assert done.output.rstrip().endswith("kernels judged: 1; all keep the contract")


def test_check_judges_the_other_stages_too():
    done = run("check", "--device", "cpu", "--stage", "sparse_mla")
    assert done.exit_code == 0, done.output
    for kernel in ("cpu", "reference"):
        assert f"sparse_mla {kernel}: keeps the contract" in done.output
    kit = sparse_mla_kit
    for line in (kit.FORMULA, kit.INDICES, kit.SINK, kit.PARTS, kit.OUTPUT, kit.REPEAT, kit.REFUSED):
        assert re.search(rf"{re.escape(line)} +│ passed [1-9]", done.output), line


def test_check_judges_cache():
    done = run("check", "--device", "cpu", "--stage", "cache")
    assert done.exit_code == 0, done.output
    for kernel in ("cpu", "reference"):
        assert f"cache {kernel}: keeps the contract" in done.output
    for line in cache_kit.LINES:
        assert re.search(rf"{re.escape(line)} +│ passed [1-9]", done.output), line


def test_check_exits_with_1_when_a_line_is_broken(monkeypatch, fresh_choices):
    def shifted(scores, *arguments):
        """The reference, except that column 0 is given as column 1."""
        out = arguments[9]
        reference.run(scores, *arguments)
        out.copy_(torch.where(out == 0, 1, out))

    monkeypatch.setattr(dispatch, "_load", lambda entry: shifted)
    done = run("check", "--tier", "tiny", "--kernel", "reference", "--device", "cpu", "--stage", "select")
    assert done.exit_code == 1
    assert "reference: breaks the contract" in done.output
    assert done.output.rstrip().endswith("broken: reference")


@pytest.mark.parametrize("verb", ["demo", "bench"])
def test_demo_and_bench_show_their_own_options(verb):
    done = run(verb, "--help")
    assert done.exit_code == 0
    assert f"Usage: keysift {verb}" in done.output


def process(*words, **environment):
    command = [sys.executable, "-m", "keysift", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_as_a_module_it_is_the_same_and_the_environment_counts():
    done = process("explain", "select", KEYSIFT_SELECT="reference")
    assert done.returncode == 0, done.stderr
    assert "-> reference  runs: the environment names it" in done.stdout
    assert "   cpu        could run, but the environment names another" in done.stdout


def test_an_environment_that_names_an_impossible_kernel_exits_with_2():
    done = process("explain", "select", "--device", "hip:gfx942", KEYSIFT_SELECT="cpu")
    assert done.returncode == 2
    assert "KEYSIFT_SELECT" in done.stderr
    assert "needs cpu" in done.stderr


def test_explain_imports_no_kernel():
    code = """
import sys
from keysift.__main__ import app
app(["explain", "select", "--device", "hip:gfx942"], standalone_mode=False)
print([name for name in ("triton", "numba", "transformers", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
