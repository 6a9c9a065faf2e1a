"""accelerate: the tokens and the logits of stock transformers, both models, every way to generate."""

import copy

import pytest
import torch
from torch import nn

import keysift
from models import ODD, SIZES, YARN, build, generate, logits, prompt

transformers = pytest.importorskip("transformers")
KINDS = ["deepseek", "glm"]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return build(request.param)


@pytest.fixture(autouse=True)
def _stock(request):
    """Whatever a test does, the shared model is stock transformers' again afterwards."""
    yield
    if "model" in request.fixturenames:
        keysift.restore(request.getfixturevalue("model")).eval().set_attn_implementation("sdpa")


def assert_same_tokens(model, inputs, new=24, **options):
    stock = generate(model, inputs, new, **options)
    keysift.accelerate(model)
    ours = generate(model, inputs, new, **options)
    keysift.restore(model)
    assert ours.tolist() == stock.tolist()
    assert stock.unique().numel() > min(new, 40) // 4, "the model repeats itself: equality would say little"


def assert_close(model, inputs, **options):
    """Logits of real tokens are within float32 rounding of stock's.

    Where two scores at the boundary of a selection differ by less than rounding (about one in 5000 here), another key
    is selected, and that token and those that attend to it differ by more: a tenth of them may.
    """
    stock = logits(model, inputs, **options)
    ours = logits(keysift.accelerate(model), inputs, **options)
    keysift.restore(model)
    real = inputs["attention_mask"].bool() if inputs["attention_mask"].ndim == 2 else slice(None)
    off = (ours - stock)[real].abs().amax(-1).flatten()  # per token; logits have a standard deviation of 1
    assert off.quantile(0.9) < 1e-5
    assert off.max() > 0, "keysift did not run"


@pytest.mark.parametrize("context", [64, 1000, 5000])
def test_greedy_tokens_are_those_of_stock_transformers(model, context):
    """200 new tokens. Stock expands every query's keys during prefill, so it reads the long context in chunks."""
    assert_same_tokens(model, prompt(context), 200, prefill_chunk_size=500 if context > 500 else None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 2, "cache_implementation": "static"},
        {"prefill_chunk_size": 17},
        {"prefill_chunk_size": 17, "cache_implementation": "static"},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_every_way_to_generate_with_left_padding(model, options):
    assert_same_tokens(model, prompt(60, batch=2, padding=20), **options)


def test_assisted_generation_verifies_several_tokens_at_once(model):
    inputs = prompt(60)
    inputs["input_ids"] = inputs["input_ids"][:, :20].repeat(1, 3)
    assert_same_tokens(model, inputs, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [ODD, {"index_topk": 1}, {"index_topk": 500}, {"rope_parameters": YARN}, {"attention_bias": True}],
    ids=["odd", "one_key", "more_keys_than_tokens", "yarn", "bias"],
)
def test_every_dimension_of_the_configuration(kind, changes):
    model = build(kind, **changes)
    assert_same_tokens(model, prompt(60, batch=2, padding=20))
    assert_close(model, prompt(60, batch=2, padding=20))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_are_within_rounding(model, attention):
    model.set_attn_implementation(attention)
    assert_close(model, prompt(150, batch=2, padding=50))


def test_logits_are_as_near_to_float64_as_those_of_stock(model):
    inputs = prompt(300)
    doubled = copy.deepcopy(model).double()
    doubled.set_experts_implementation("eager")  # the default has no float64
    exact = logits(doubled, inputs)
    stock, ours = logits(model, inputs), logits(keysift.accelerate(model), inputs)
    errors = [(found.double() - exact).abs().amax(-1).flatten() for found in (stock, ours)]  # per token
    # A quantile, since float64 may itself select another key where two scores differ by less than rounding.
    for quantile in (0.5, 0.95):
        assert errors[1].quantile(quantile) < 1.5 * errors[0].quantile(quantile)


def test_bfloat16_is_as_near_to_float32_as_stock_is(model):
    inputs = prompt(150, batch=2, padding=50)
    exact = logits(model, inputs)
    rounded = copy.deepcopy(model).bfloat16()
    stock = logits(rounded, inputs).float()
    ours = logits(keysift.accelerate(rounded), inputs).float()
    errors = [(found - exact)[inputs["attention_mask"].bool()].abs().mean() for found in (stock, ours)]
    assert errors[1] < 1.25 * errors[0]
    assert generate(rounded, inputs, 4).shape == (2, 4)


def test_packed_sequences_do_not_see_each_other(model):
    """A 4-D mask of one's own, as long as every row is one range of columns."""
    inputs = prompt(80)
    position = torch.arange(80)
    same = (position[:, None] < 50) == (position < 50)
    inputs["attention_mask"] = (same & (position[:, None] >= position))[None, None]
    assert_close(model, inputs, position_ids=torch.cat((torch.arange(50), torch.arange(30)))[None])


def test_a_continued_cache_is_the_same_as_one_prompt(model):
    """Latents stay latents in the cache, beside the index keys; several tokens may follow at once."""
    inputs = prompt(90)["input_ids"]
    keysift.accelerate(model)
    whole = logits(model, {"input_ids": inputs})
    cache = transformers.DynamicCache(config=model.config)
    name = "cache" if hasattr(model(inputs[:, :1]), "cache") else "past_key_values"
    parts = [logits(model, {"input_ids": part}, **{name: cache}) for part in inputs.split([60, 25, 4, 1], dim=1)]
    assert (torch.cat(parts, 1) - whole).abs().amax(-1).quantile(0.9) < 1e-5
    assert cache.layers[0].keys.shape == (1, 1, 90, SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])
    assert cache.layers[0].values.numel() == 0
    assert cache.layers[0].indexer_keys.shape == (1, 90, SIZES["index_head_dim"])


def test_index_keys_are_kept_in_the_dtype_that_is_asked_for(model):
    keysift.accelerate(model, index_dtype=torch.bfloat16)
    output = model(**prompt(40))
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    assert cache.layers[0].indexer_keys.dtype == torch.bfloat16
    assert cache.layers[0].keys.dtype == torch.float32
    assert generate(model, prompt(40), 4).shape == (1, 4)


def test_restore_gives_the_same_model_back(model):
    attentions = [layer.self_attn for layer in model.model.layers]
    before = [(dict(vars(attention)), attention.forward.__func__) for attention in attentions]
    weights = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert keysift.accelerate(model) is model
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == weights
    keysift.accelerate(model, kernel="reference")  # a second call replaces the options
    assert keysift.restore(model) is model
    assert [(dict(vars(attention)), attention.forward.__func__) for attention in attentions] == before
    keysift.restore(model)  # nothing left to undo


def test_checkpoints_are_what_they_were(model, tmp_path):
    inputs = prompt(40)
    keysift.accelerate(model)
    wanted = logits(model, inputs)
    model.save_pretrained(tmp_path, safe_serialization=True)
    loaded = type(model).from_pretrained(tmp_path).eval()
    keysift.restore(model)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    assert torch.equal(logits(keysift.accelerate(loaded), inputs), wanted)


def test_a_copy_is_accelerated_on_its_own(model):
    keysift.accelerate(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.model.layers[0].self_attn.kv_b_proj.weight)
    keysift.restore(model)
    assert not torch.equal(logits(twin, prompt(40)), logits(model, prompt(40)))
    assert twin.model.layers[0].self_attn.forward.args[0] is twin.model.layers[0].self_attn


def test_a_pickled_model_comes_back_accelerated(model, tmp_path):
    keysift.accelerate(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert loaded.model.layers[0].self_attn.forward.args[0] is loaded.model.layers[0].self_attn
    inputs = prompt(40)
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))


def test_kernels_are_chosen_by_stage(model):
    inputs = prompt(40)
    keysift.accelerate(model, kernel={"score": "reference", "select": "reference", "sparse_mla": "reference"})
    ours = logits(model, inputs)
    keysift.restore(model)
    assert (ours - logits(model, inputs)).abs().amax(-1).quantile(0.9) < 1e-5


def test_a_whole_graph_can_be_traced(model):
    keysift.accelerate(model)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    inputs = prompt(40, batch=2, padding=10)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
