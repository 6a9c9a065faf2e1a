"""The index in fp8: what is kept, what is scored, and that every way to generate goes on with it."""

import pytest
import torch

import keysift
from keysift.plugins import fp8_index
from keysift.rotation import hadamard
from models import SIZES, build, generate, logits, prompt

transformers = pytest.importorskip("transformers")
FORMATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]


@pytest.fixture(scope="module", params=["deepseek", "glm"])
def model(request):
    return build(request.param)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [16, 128, 12])
def test_keys_and_queries_mean_what_they_did(dtype, width):
    """Within 2**-4 of the largest value of a token; a width that is no power of two is not turned."""
    k, q, weights = torch.randn(3, 40, width), torch.randn(3, 40, 4, width), torch.rand(3, 40, 4)
    turn = hadamard if width != 12 else (lambda x: x)
    kept = fp8_index.keys(k, dtype)
    assert kept.shape == (3, 40, width + 4)
    for b in range(3):
        values, scale = fp8_index.split(kept[b], dtype)
        assert values.dtype == dtype
        off = (values.float() * scale[:, None] - turn(k[b])).abs()
        assert (off <= turn(k[b]).abs().amax(1, keepdim=True) * 2**-4).all()
        assert off.max() > 0
    values, scaled = fp8_index.queries(q, weights, dtype)
    assert values.shape == q.shape
    assert values.dtype == dtype
    scale = scaled / weights
    off = (values.float() * scale[..., None] - turn(q)).abs()
    assert (off <= turn(q).abs().amax(-1, keepdim=True) * 2**-4).all()


def test_the_cache_keeps_bytes(model):
    keysift.accelerate(model, index_dtype=torch.float8_e4m3fn)
    try:
        output = model(**prompt(40))
        cache = output.cache if hasattr(output, "cache") else output.past_key_values
        kept = cache.layers[0].indexer_keys
        assert kept.dtype == torch.uint8
        assert kept.shape == (1, 40, SIZES["index_head_dim"] + 4)
    finally:
        keysift.restore(model)


def test_prefill_in_chunks_and_decode_go_on_alike(model):
    inputs = prompt(90)["input_ids"]
    keysift.accelerate(model, index_dtype=torch.float8_e4m3fn)
    try:
        whole = logits(model, {"input_ids": inputs})
        cache = transformers.DynamicCache(config=model.config)
        name = "cache" if hasattr(model(inputs[:, :1]), "cache") else "past_key_values"
        parts = [logits(model, {"input_ids": part}, **{name: cache}) for part in inputs.split([60, 25, 4, 1], dim=1)]
        # A key at the border may change sides: a rounding error of float32 moves a query by one step of fp8.
        assert (torch.cat(parts, 1) - whole).abs().amax(-1).quantile(0.8) < 1e-4
    finally:
        keysift.restore(model)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_every_way_to_generate(model, options):
    inputs = prompt(60, batch=2, padding=7)
    keysift.accelerate(model, index_dtype=torch.float8_e4m3fn)
    try:
        assert generate(model, inputs, 6, **options).shape == (2, 6)
    finally:
        keysift.restore(model)


def test_most_of_the_selection_stays(model):
    inputs = prompt(300)
    exact = logits(model, inputs)
    keysift.accelerate(model, index_dtype=torch.float8_e4m3fn)
    try:
        off = (logits(model, inputs) - exact).abs().amax(-1)
    finally:
        keysift.restore(model)
    assert 0 < off.median() < 1.0  # random weights, 24 keys of 300: each counts


def test_a_head_size_that_no_page_holds_is_refused():
    model = build("deepseek", index_head_dim=10)
    with pytest.raises(ValueError, match="head_dim is 10; an fp8 page needs a multiple of 4"):
        keysift.accelerate(model, index_dtype=torch.float8_e4m3fn)
    assert not hasattr(model.model.layers[0].self_attn, "_keysift")
