"""The shape of the repository: who may import whom, how long a file may be, and that the kit judges every kernel."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keysift
from keysift import dispatch

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "keysift"
OPS = SRC / "ops"
MODULES = sorted(SRC.rglob("*.py"))
STAGES = sorted(folder.name for folder in OPS.iterdir() if (folder / "api.py").exists())

# The only modules that see several stages; `keysift.__init__` hands out their names.
SEE_SEVERAL = {"__init__", "__main__", "benchmarks", "demo", "distributed", "indexer", "plugins", "step"}
SEE_SEVERAL_TOO = {"testing/index"}  # judges what joins them
OPTIONAL = {"triton", "numba", "transformers", "matplotlib", "cuda", "deep_gemm", "flash_mla", "vllm", "sglang"}

# Lines; what may be longer stands in LONGER with its reason.
BUDGETS = (
    ("src/keysift/ops/*/api.py", 250),
    ("src/keysift/ops/*/reference.py", 120),
    ("src/keysift/dispatch.py", 130),
    ("src/keysift/step.py", 60),
    ("src/keysift/**/__init__.py", 40),
    ("src/keysift/**/*.py", 400),
    ("tests/**/*.py", 400),
    ("benchmarks/**/*.py", 400),
)
LONGER = {
    "src/keysift/dispatch.py": (210, "a quarter of it is docstrings, and it holds the device vocabulary too"),
    "src/keysift/ops/select/api.py": (
        385,
        "three public forms of one operation, each with its docstring, and what each of four kernels needs",
    ),
    "src/keysift/benchmarks/__init__.py": (160, "the options of `keysift bench`, one a line"),
    "benchmarks/figures.py": (480, "a figure or a table of every stage's record, one function each"),
    "src/keysift/testing/__init__.py": (50, "the names of five kits"),
    "src/keysift/ops/cache/api.py": (325, "five public functions, each with its docstring"),
    "src/keysift/ops/sparse_mla/api.py": (
        440,
        "four public functions, each with its docstring, two operators, and what a kernel of another package needs",
    ),
}
ALL_OF_SRC = 14500  # grows with each stage's kernels
PUBLIC_NAMES = 22  # every stage's functions, the two layouts, and what joins stages


def relative(path):
    return path.relative_to(ROOT).as_posix()


def module_name(path):
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, top_level=False):
    """Absolute names that a module imports: everywhere, or only where they are imported with it."""
    tree = ast.parse(path.read_text())
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    nodes = list(_at_import(tree.body)) if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _at_import(body):
    """Statements that run when a module is imported; what only a type checker reads does not."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers"):
            yield from _at_import(getattr(node, inner, []))


def stages_seen(path):
    return {match[1] for name in imports(path) if (match := re.match(r"keysift\.ops\.(\w+)", name))} & set(STAGES)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_named_modules_see_several_stages(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    if parts[0] in SEE_SEVERAL or "/".join(parts) in SEE_SEVERAL_TOO:
        return
    own = {parts[1]} if parts[0] == "ops" and len(parts) > 2 else set()
    seen = stages_seen(path)
    assert len(seen | own) <= 1, f"{relative(path)} imports {sorted(seen)}"


@pytest.mark.parametrize("path", sorted(OPS.glob("*/kernel_*.py")), ids=relative)
def test_kernels_import_neither_each_other_nor_the_reference(path):
    kernel = path.stem.split("_")[1]
    for name in imports(path):
        match = re.match(r"keysift\.ops\.\w+\.(kernel_([a-z0-9]+)|reference|api)", name)
        assert match is None or match[2] == kernel, f"{relative(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_optional_packages_are_imported_only_where_they_are_needed(path):
    if path.name.startswith("kernel_") or path.parent.name == "plugins":
        return
    at_import = {name.split(".")[0] for name in imports(path, top_level=True)}
    assert not at_import & OPTIONAL, f"{relative(path)} imports {sorted(at_import & OPTIONAL)} when it is imported"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_is_named_like_a_package_that_it_imports(path):
    assert path.stem not in {name.split(".")[0] for name in imports(path)}


def test_every_stage_folder_has_the_same_files():
    assert {"cache", "score", "select", "sparse_mla"} <= set(STAGES)
    for stage in STAGES:
        files = {path.name for path in (OPS / stage).iterdir() if path.suffix in (".py", ".cu", ".hip")}
        always = {"__init__.py", "api.py", "checks.py", "kernel_cpu.py", "reference.py"}
        assert always <= files, f"{stage} lacks {sorted(always - files)}"
        strange = {
            name
            for name in files - always
            if not re.fullmatch(r"kernel_(cpu|cuda|triton|hip|flash_mla|deep_gemm)(_\w+)?\.\w+", name)
        }
        assert not strange, f"{stage} has {sorted(strange)}"
    assert not (OPS / "__init__.py").read_text(), "a stage's function and its package share a name, so ops stays empty"


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_follows_the_pattern(stage):
    api = importlib.import_module(f"keysift.ops.{stage}.api")
    assert [kernel.name for kernel in api.KERNELS][-1] == "reference"
    assert len({kernel.name for kernel in api.KERNELS}) == len(api.KERNELS)
    for kernel in api.KERNELS:
        module, _, function = kernel.entry.partition(":")
        path = SRC.parent / (module.replace(".", "/") + ".py")
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert path.parent == OPS / stage
        assert function in functions, f"{kernel.entry} does not exist"
        assert path.stem in ("reference", f"kernel_{kernel.name}"), "a kernel is called like its file"
    files = {path.stem for path in (OPS / stage).glob("kernel_*.py")}
    for name in {kernel.name for kernel in api.KERNELS} - {"reference"}:
        files -= {file for file in files if re.fullmatch(rf"kernel_{name}(_\w+)?", file)}
    assert not files, "every kernel file stands in the table"
    public = importlib.import_module(f"keysift.ops.{stage}").__all__
    for name in public:
        documented = getattr(api, name).__doc__ or ""
        assert ">>>" in documented, f"{name} has no example"


def test_every_kernel_of_select_is_judged_by_the_kit():
    from keysift.ops.select import api
    from keysift.testing import select_kernels

    assert [name for name, _ in select_kernels("cpu")] == [kernel.name for kernel in api.KERNELS]
    facts = dispatch.parse_device("cpu")
    for kernel, (name, selector) in zip(api.KERNELS, select_kernels("cpu"), strict=True):
        unmet = kernel.unmet(api.Problem(facts, torch.float32, 4, 1024, 512))
        assert callable(selector) or selector == unmet, f"{name} can run here and is not judged"


def budget(path):
    name = relative(path)
    if name in LONGER:
        return LONGER[name][0]
    return next(lines for pattern, lines in BUDGETS if path in set(ROOT.glob(pattern)))


@pytest.mark.parametrize("path", sorted({path for pattern, _ in BUDGETS for path in ROOT.glob(pattern)}), ids=relative)
def test_no_file_is_longer_than_its_budget(path):
    lines = len(path.read_text().splitlines())
    assert lines <= budget(path), f"{relative(path)} has {lines} lines; split it, or give LONGER a reason"


def test_the_whole_package_is_within_its_budget():
    assert sum(len(path.read_text().splitlines()) for path in MODULES) <= ALL_OF_SRC


def test_exceptions_to_budgets_are_still_needed():
    for name, (_, reason) in LONGER.items():
        path = ROOT / name
        ordinary = next(lines for pattern, lines in BUDGETS if path in set(ROOT.glob(pattern)))
        assert reason
        assert len(path.read_text().splitlines()) > ordinary, f"{name} fits the ordinary budget again"


def test_public_names_are_few_and_sorted_and_exist():
    assert len(keysift.__all__) <= PUBLIC_NAMES
    assert keysift.__all__ == sorted(keysift.__all__)
    for name in keysift.__all__:
        assert callable(getattr(keysift, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'topk'"):
        keysift.topk  # noqa: B018


def test_importing_keysift_imports_no_optional_package():
    packages = sorted(OPTIONAL - {"cuda"} | {"cuda.core"})  # torch imports `cuda` itself
    code = f"import sys, keysift; print([name for name in {packages} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_one():
    assert keysift.__version__ == importlib.metadata.version("keysift")
    assert f"## {keysift.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_environment_variables_are_read_in_one_place():
    for path in MODULES:
        if path != SRC / "dispatch.py":
            assert "KEYSIFT_" not in "".join(re.findall(r"environ[^\n]*", path.read_text())), relative(path)
