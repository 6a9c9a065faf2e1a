"""What accelerate and an accelerated model refuse, rather than compute something else."""

import copy

import pytest
import torch
from torch import nn

import keysift
from keysift.plugins.transformers_patch import _windows

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    config = transformers.DeepseekV32Config(
        vocab_size=31, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        index_n_heads=4, index_head_dim=8, index_topk=4, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config).eval()


IDS = torch.arange(1, 11)[None]


def attention(model):
    return model.model.layers[1].self_attn


@pytest.mark.parametrize("call", [keysift.accelerate, keysift.restore])
def test_other_models(call, model):
    for other in (nn.Linear(2, 2), model.model, None):
        with pytest.raises(TypeError, match="it may be transformers' DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM"):
            call(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "fast"}, "kernel is 'fast' for select; it may be"),
        ({"kernel": {"score": "fast"}}, "kernel is 'fast' for score; it may be cpu, triton, deep_gemm, reference"),
        ({"kernel": {"topk": "cpu"}}, "kernel names the stage 'topk'; it may name score, select, sparse_mla"),
        ({"index_dtype": torch.float64}, "index_dtype is torch.float64; it may be None or torch.float32"),
        ({"index_dtype": torch.float8_e5m2}, "index_dtype is torch.float8_e5m2"),
    ],
)
def test_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        keysift.accelerate(model, **options)
    assert "forward" not in vars(attention(model))


def test_a_kernel_that_is_neither_name_nor_mapping(model):
    with pytest.raises(TypeError, match="kernel is list; it may be None, a name, or a mapping"):
        keysift.accelerate(model, kernel=["cpu"])


def test_a_model_of_float64(model):
    with pytest.raises(ValueError, match=r"kv_b_proj of attention layer 0 is torch\.float64"):
        keysift.accelerate(copy.deepcopy(model).double())


class Adapted(nn.Module):
    """What adapters and quantisers put in a linear layer's place: it has a weight, and its weight is not the answer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.weight = base.weight

    def forward(self, x):
        return 2 * self.base(x)


def adapt(linear):
    return Adapted(linear)


def hook(linear):
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    return linear


def parametrize(linear):
    nn.utils.parametrizations.weight_norm(linear)
    return linear


def replace_forward(linear):
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    return linear


def add_bias(linear):
    linear.bias = nn.Parameter(torch.ones(linear.out_features))
    return linear


@pytest.mark.parametrize("change", [adapt, hook, parametrize, replace_forward, add_bias])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_value_projection_that_is_not_a_plain_layer(model, change, when):
    if when == "after":
        keysift.accelerate(model)
    attention(model).kv_b_proj = change(attention(model).kv_b_proj)
    with pytest.raises(ValueError, match=r"kv_b_proj of attention layer 1 .* plain"):
        keysift.accelerate(model) if when == "before" else model(IDS)
    if when == "before":
        assert "forward" not in vars(model.model.layers[0].self_attn)


def test_an_attention_that_another_library_replaced(model):
    attention(model).forward = attention(model).forward
    with pytest.raises(ValueError, match="attention layer 1 has been replaced by another library"):
        keysift.accelerate(model)


def test_training(model):
    keysift.accelerate(model.train())
    with pytest.raises(RuntimeError, match=r"inference only; call model.eval\(\), or keysift.restore"):
        model(IDS)
    output = model.eval()(IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="no backward pass"):
        output.loss.backward()


def test_attention_weights(model):
    keysift.accelerate(model)
    with pytest.raises(ValueError, match="output_attentions is set"):
        model(IDS, output_attentions=True)


def test_a_mask_with_holes(model):
    keysift.accelerate(model)
    mask = torch.ones_like(IDS)
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="attention_mask is not one range of columns per query token"):
        model(IDS, attention_mask=mask)


def test_a_mask_that_another_attention_implementation_makes(model):
    keysift.accelerate(model)
    with pytest.raises(ValueError, match="attention_mask reaches the attention as NoneType; it must be"):
        model(IDS, attention_mask={"indexed_attention": None, "deepseek_sparse_attention": None})


def test_a_cache_that_stock_transformers_filled(model):
    cache = transformers.DynamicCache(config=model.config)
    output = model(IDS, use_cache=True)
    name = "cache" if hasattr(output, "cache") else "past_key_values"
    model(IDS, **{name: cache})
    keysift.accelerate(model)
    with pytest.raises(ValueError, match="filled or laid out by stock transformers"):
        model(IDS, **{name: cache})


def test_windows_of_masks():
    allowed = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)[None, None]
    lowest = torch.finfo(torch.float32).min
    for mask in (allowed, torch.where(allowed, 0.0, lowest), torch.where(allowed, 0.0, -torch.inf)):
        start, end = _windows(mask, 2)
        assert start.tolist() == [0, 0, 1, 0] * 2
        assert end.tolist() == [0, 1, 3, 4] * 2
    for bias in (-1.0, 0.5, torch.nan):  # a bias is not a mask
        with pytest.raises(ValueError, match="attention_mask is not one range"):
            _windows(torch.where(allowed, bias, lowest), 1)
