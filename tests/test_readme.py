"""What README.md and docs/ show is true: every python block runs, every command exists, the cheap ones are run."""

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from keysift import benchmarks
from keysift.__main__ import app
from keysift.demo import demo

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CONTRACT.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERBS = ("keysift", "make", "python", ".venv/bin/keysift", ".venv/bin/pytest", ".venv/bin/python")

demo_app = typer.Typer()
demo_app.command()(demo)


def relative(path):
    return path.relative_to(ROOT).as_posix()


def blocks(page, language):
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def commands(page):
    """Every shell command that a page shows, in a block or in a line of text, without its comment."""
    text = page.read_text()
    lines = [line for name, body in FENCE.findall(text) if name != "python" for line in body.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    for line in lines:
        command = re.split(r"\s+#", line.removeprefix("$ ").strip())[0]
        if command.split(" ")[0] in VERBS and (" " in command or command == "keysift"):
            yield command


SHOWN = sorted({command for page in [*PAGES, *OTHERS] for command in commands(page)})


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A working directory with a small DSA model in ./checkpoint."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        index_n_heads=2, index_head_dim=16, index_topk=6, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    transformers.DeepseekV32ForCausalLM(config).save_pretrained("checkpoint")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=relative)
def test_the_python_blocks_of_a_page_run_one_after_another(page, checkpoint):
    namespace = {"__name__": "__main__"}
    with warnings.catch_warnings():  # a page may change the filters
        for number, block in enumerate(blocks(page, "python"), start=1):
            exec(compile(block, f"{relative(page)}, python block {number}", "exec"), namespace)


def test_readme_accelerates_a_model_and_runs_the_stages(checkpoint):
    namespace = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(block, namespace)
    assert hasattr(namespace["model"].model.layers[0].self_attn, "_keysift")
    assert namespace["indices"].shape == (2, 256)
    assert namespace["out"].shape == (2, 16, 512)


@pytest.mark.parametrize("command", SHOWN)
def test_every_command_that_is_shown_exists(command):
    words = shlex.split(command)
    program, words = Path(words[0]).name, words[1:]
    if program == "python" and words[:2] == ["-m", "keysift"]:
        program, words = "keysift", words[2:]
    if program == "keysift":
        assert_accepted(typer.main.get_command(app), words, command)
    elif program == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = [word for word in words if "=" not in word and word != "..."]
        assert set(named) <= targets, command
    elif program == "pytest":
        assert (ROOT / words[0]).exists(), command
    else:
        assert (ROOT / words[0]).exists(), command
        done = subprocess.run(
            [sys.executable, words[0], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        if len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in done.stdout, command


def assert_accepted(command, words, shown):
    """The verbs exist and so does every option."""
    for position, word in enumerate(words):
        if word in ("demo", "bench") and position == 0:
            inner = demo_app if word == "demo" else benchmarks.app
            return assert_accepted(typer.main.get_command(inner), words[1:], shown)
        if word.startswith("--"):
            options = {option for parameter in command.params for option in parameter.opts}
            assert word.split("=")[0] in options | {"--help"}, f"{shown}: {word} is no option"
        elif getattr(command, "commands", None):
            if "|" in words:
                return None  # a list of verbs, not a command
            assert word in command.commands, f"{shown}: there is no {word}"
            command = command.commands[word]
    return None


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page, "console")], ids=lambda b: b.split("\n")[0]
)
def test_a_console_block_shows_what_the_command_prints(block):
    first, _, output = block.partition("\n")
    words = shlex.split(first.removeprefix("$ "))
    assert words[:2] == ["keysift", "explain"]
    assert CliRunner().invoke(app, words[1:]).output == output


def test_the_readme_shows_an_explanation():
    assert blocks(ROOT / "README.md", "console")


@pytest.mark.parametrize(
    "command",
    [
        "keysift explain select --device hip:gfx942",
        "keysift check --tier tiny",
        "keysift bench select --rows 1 --columns 131072",
        pytest.param("keysift demo --context 512", marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_the_readme_do_what_it_says(command, tmp_path):
    assert command in set(commands(ROOT / "README.md"))
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if " demo " in command:
        assert "keysift: the same 16 tokens" in done.stdout
        assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_links_between_the_pages_lead_somewhere():
    for page in [*PAGES, *OTHERS]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text())):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{relative(page)} links to {target}"


def test_the_pages_name_no_function_that_is_not_there():
    import keysift

    for page in [*PAGES, *OTHERS]:
        for name in re.findall(r"`keysift\.([a-z_]+)[`(]", page.read_text()):
            assert hasattr(keysift, name) or (ROOT / "src" / "keysift" / name).exists(), f"{relative(page)}: {name}"


def test_figures_in_the_readme_are_those_of_the_records():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import figures
    finally:
        sys.path.pop(0)
    text = (ROOT / "README.md").read_text()
    assert figures.with_block(text, figures.block(ROOT / "benchmarks" / "results")) == text
