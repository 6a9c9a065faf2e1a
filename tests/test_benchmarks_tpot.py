"""`keysift bench tpot`: the stack is attention, its selectors agree, and the record says what was timed."""

import dataclasses
import importlib.util
import pathlib

import pytest
import torch
from typer.testing import CliRunner

from keysift.benchmarks import app, bench_tpot, record
from keysift.benchmarks.stack import MODELS, PAGE_SIZE, STAGES, Model, Stack, select_by, select_torch

CPU = torch.device("cpu")
TINY = Model(2, 24, 3, 16, 12, 8, 4, 6, 2, 8, 20, index_interleaved=False)


def stack(dims=TINY, batch=2, context=100, memory=1 << 30):
    return Stack(dims, dims.heads, dims.layers, batch, context, 8, CPU, memory)


def test_a_step_attends_to_everything_where_k_spans_the_context():
    """Against softmax over expanded keys and values, head by head, in float64."""
    dims = dataclasses.replace(TINY, topk=300)
    made = stack(dims, batch=1)
    made.begin()
    for stage in STAGES[:-1]:
        made.run(0, stage, select_by("reference"))
    length = int(made.lengths[0])
    order = made.table[0].long()
    kv = made.caches[0].latent[order].flatten(0, 1)[:length].double()
    latent = kv[:, : dims.latent]
    for head in range(dims.heads):
        query = made.q[0, head].double()
        logits = (latent @ query[: dims.latent] + kv[:, dims.latent :] @ query[dims.latent :]) / (
            dims.nope + dims.rope
        ) ** 0.5
        wanted = logits.softmax(0) @ latent
        torch.testing.assert_close(made.attended[0, 0, head].double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kv[-1].float(), made.kv[0])  # the new token is the last of the cache


@pytest.mark.parametrize("kernel", ["reference", "cpu", None])
def test_selectors_select_the_same_scores(kernel):
    made = stack()
    made.begin()
    bench_tpot._step(made, select_torch)
    one = bench_tpot._values(made, select_torch)
    other = bench_tpot._values(made, select_by(kernel))
    assert one.shape == (2, 20)
    assert (one > -torch.inf).all()
    assert torch.equal(one, other)
    assert torch.equal(one, made.scores[:, :101].topk(20).values.flip(1))


def test_a_selector_that_differs_gets_no_time(monkeypatch):
    def second_best(scores, lengths, table, k):
        return select_torch(scores, lengths, table, k + 1)[:, 1:]

    monkeypatch.setattr(bench_tpot, "select_torch", second_best)
    entry = bench_tpot.measure(stack(), ["auto", "torch"], 100, 0.01)
    assert entry == {"fault": "torch selected other scores than auto"}


def test_layers_take_turns_on_the_caches_that_memory_holds():
    page = PAGE_SIZE * 4 * (TINY.index_dim + TINY.latent + TINY.rope)
    assert stack(memory=4 * page).cache_sets == 1
    assert stack(memory=8 * page).cache_sets == 2


def test_every_model_divides_its_heads():
    for name, dims in MODELS.items():
        assert dims.heads % 8 == 0, name


def bench(*options):
    return CliRunner().invoke(app, ["tpot", "--device", "cpu", "--seconds", "0.01", *options])


def test_the_command_times_both_selectors_and_records_it(tmp_path):
    path = tmp_path / "tpot-cpu.json"
    result = bench("--layers", "1", "--tensor-parallel", "64", "--batch", "1,2", "--context", "80", "--json", str(path))
    assert result.exit_code == 0, result.output
    made = record.read(path, "tpot")
    assert list(made["cases"]) == ["deepseek-v3.2-tp64-1x80", "deepseek-v3.2-tp64-2x80"]
    for entry in made["cases"].values():
        assert list(entry["selectors"]) == ["torch", "auto"]
        assert entry["selectors"]["auto"]["kernel"] == "cpu"
        for found in entry["selectors"].values():
            assert list(found["stages_ms"]) == list(STAGES)
            assert 0.3 * found["ms"] < sum(found["stages_ms"].values()) < 3 * found["ms"]
    with pytest.raises(ValueError, match="no record of `keysift bench select`"):
        record.read(path)

    figures = pathlib.Path(__file__).parents[1] / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", figures)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw_steps(made, tmp_path / "tpot.svg")
    assert "ms per output token" in (tmp_path / "tpot.svg").read_text()
    assert "| 2 x 80 |" in module.tpot_block(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel", "3"], "divide"),
        (["--batch", "1,x"], "--batch"),
        (["--select", "torch,nobody"], "reference"),
        (["--model", "gpt"], "glm-5"),
    ],
)
def test_options_that_do_not_fit_exit_2(options, message):
    result = bench(*options)
    assert result.exit_code == 2
    assert message in result.output


def test_a_fault_exits_1(monkeypatch):
    monkeypatch.setattr(bench_tpot, "measure", lambda *_: {"fault": "made up"})
    result = bench("--layers", "1", "--tensor-parallel", "64", "--context", "64")
    assert result.exit_code == 1
    assert "made up" in result.output
