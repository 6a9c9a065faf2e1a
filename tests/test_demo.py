"""`keysift demo`: what it promises to check, to refuse, to print and to write."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import keysift
from keysift import indexer
from keysift.demo import command, demo, measure, model

pytest.importorskip("transformers")

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(demo)
SMALL = ["--context", "96", "--new-tokens", "4", "--heads", "2", "--hidden", "64"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products are slower when two threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small():
    """A model whose context of 40 is four times k, and a prompt."""
    prompt = torch.tensor([list(command.DEFAULT_TEXT.read_bytes()[:40])])
    return model.build_model(40, heads=2, layers=2, hidden=64, seed=3), prompt


def cache(of):
    from transformers import DynamicCache

    return DynamicCache(config=of.config)


def logits(of, prompt, **options):
    """[tokens, vocabulary] of a greedy generation."""
    return torch.cat(measure.generate(of, prompt, cache(of), 4, **options).logits)


def run(folder, *options, small=SMALL):
    outputs = ["--png", str(folder / "demo.png"), "--json", str(folder / "demo.json")]
    return CliRunner().invoke(app, [*small, *outputs, *options])


def test_it_generates_the_same_tokens_and_writes_figure_and_record(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "keysift: the same 4 tokens" in result.output
    assert "keysift, torch.topk: the same 4 tokens" in result.output
    assert "index heads 64 x 128" in result.output
    assert "attention heads 2 (of 128)" in result.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["context"] == 96
    assert record["configuration"]["index_topk"] == 24
    assert set(record["versions"]) >= {"python", "torch", "transformers", "keysift"}
    assert list(record["runs"]) == list(model.VARIANTS)
    for name, figures in record["runs"].items():
        assert figures["tokens"] == record["runs"]["stock"]["tokens"]
        assert len(figures["token_s"]) == 3
        assert sum(figures["stage_s"].values()) == pytest.approx(figures["profiled_token_s"])
        assert all(seconds > 0 for seconds in figures["stage_s"].values()), (name, figures["stage_s"])


def test_tokens_that_differ_are_an_error(tmp_path, monkeypatch):
    def first_columns(scores, k, *, out, **_):
        return out.copy_(torch.arange(k).expand_as(out))

    monkeypatch.setattr(model, "topk_select", first_columns)
    result = run(tmp_path, "--layers", "1")
    assert result.exit_code == 1, result.output
    assert "keysift, torch.topk: token 0 is" in result.output
    assert "keysift: the same 4 tokens" in result.output
    assert "time per output token" not in result.output
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_is_no_figure_and_it_says_so(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    result = run(tmp_path, "--layers", "1")
    assert result.exit_code == 0, result.output
    assert "keysift[bench]" in result.output
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--context", "1"], "it may be 2 to"),
        (["--context", "10000000"], "it may be 2 to"),
        (["--text", "no such file"], "no such file"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--heads", "0"], "--heads"),
        (["--device", "abacus"], "it may be cpu or cuda"),
        (["--png", "no/such/folder/demo.png"], "no folder"),
        (["--json", "no/such/folder/demo.json"], "no folder"),
    ],
)
def test_bad_options_are_refused_before_anything_is_done(tmp_path, monkeypatch, options, named):
    monkeypatch.setattr(command, "build_model", lambda *_: pytest.fail("built a model"))
    result = run(tmp_path, *options)
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_the_default_text_holds_the_default_context_and_does_not_repeat_itself():
    text = command.DEFAULT_TEXT.read_text(encoding="ascii")
    assert len(text) >= 2 * max(command.DEFAULT_CONTEXT.values())
    sentences = [sentence for sentence in text.replace("\n", " ").split(". ") if len(sentence) > 20]
    assert len(set(sentences)) == len(sentences)


def test_stock_prefill_in_chunks_gives_the_logits_of_stock_prefill(small):
    whole, chunks = (logits(*small, prefill_chunk_size=size) for size in (None, 7))
    torch.testing.assert_close(chunks, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("context", [2, 96, 4096, 8192, 163840])
def test_a_chunk_of_stock_scores_stays_within_its_memory(context):
    chunk = measure.prefill_chunk(context)
    assert 1 <= chunk <= context
    assert 4 * 64 * chunk * context <= measure.SCORE_BYTES


def test_what_is_selected_decides_what_is_generated(small):
    of, prompt = small
    first = logits(of, prompt)[0]
    assert float(first.topk(2).values.diff().abs()) > 1e-3
    indexers = [layer.self_attn.indexer for layer in of.model.layers]
    k = of.config.index_topk
    try:
        for module in indexers:
            module.index_topk = k - 1
        assert float((logits(of, prompt)[0] - first).abs().max()) > 1e-2
    finally:
        for module in indexers:
            module.index_topk = k


def test_the_weights_come_from_the_seed_alone():
    ours, same, other = (model.build_model(40, heads=2, layers=1, hidden=64, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), same.parameters(), strict=True))
    assert not torch.equal(ours.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize(
    ("k", "index_base"), [(1, "window"), (5, "window"), (5, "column"), (40, "column"), (50, "window")]
)
def test_the_fallback_selects_what_select_selects(k, index_base):
    scores = torch.randn(6, 40, generator=torch.Generator().manual_seed(k))
    start, end = torch.tensor([0, 3, 3, 39, 7, 0]), torch.tensor([40, 40, 4, 40, 7, 12])
    out = torch.full((6, k), 777, dtype=torch.int32)
    model.topk_select(scores, k, start=start, end=end, index_base=index_base, out=out)
    ours = keysift.select(scores, k, start=start, end=end, index_base=index_base)
    assert torch.equal(out.sort().values, ours.sort().values)


def test_a_variant_leaves_nothing_behind(small):
    of, prompt = small
    before, select = logits(of, prompt), indexer.select

    def interrupted(name):
        with model.variant(of, name):
            assert (indexer.select is model.topk_select) == (name == "keysift, torch.topk")
            raise KeyboardInterrupt

    for name in model.VARIANTS:
        with pytest.raises(KeyboardInterrupt):
            interrupted(name)
        assert indexer.select is select
        assert torch.equal(logits(of, prompt), before)


def test_memory_sees_what_was_in_use_and_is_gone():
    memory = measure.Memory(torch.device("cpu"))
    memory.start()
    if memory.peak() is None:
        pytest.skip(memory.how)
    torch.ones(64 << 20, dtype=torch.uint8)
    assert memory.peak() > 60 << 20
    memory.reset()
    assert memory.peak() < 30 << 20


def test_the_stages_of_stock_leave_no_hooks(small):
    of, _ = small
    with measure.stage_ranges(of):
        assert of.model.layers[0].self_attn._forward_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in of.modules())


def test_the_text_is_in_the_package():
    assert command.DEFAULT_TEXT.is_relative_to(Path(keysift.__file__).parent)
