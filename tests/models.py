"""Tiny random models of both architectures, and what the tests ask of them."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

#: Tiny widths, real structure: dense and expert layers, low-rank queries, a latent beside its RoPE part, k below the
#: context. Sixteen index heads, so that a score of exactly zero (all heads cut off), which ties, is not met.
SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 24,
    "first_k_dense_replace": 1, "max_position_embeddings": 8192, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 2048, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
ODD = {
    "num_attention_heads": 3, "num_key_value_heads": 3, "index_n_heads": 13, "kv_lora_rank": 10, "v_head_dim": 7,
    "qk_nope_head_dim": 9, "qk_rope_head_dim": 6, "index_head_dim": 11, "q_lora_rank": 17,
}  # fmt: skip


def build(kind, **changes):
    """A random model whose activations stay near 1, so that logits differ and attention is not flat."""
    torch.manual_seed(0)
    sizes = {**SIZES, **changes}
    if kind == "deepseek":
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes))
    else:
        sizes["num_hidden_layers"] = 3
        config = transformers.GlmMoeDsaConfig(**sizes, indexer_types=["full", "shared", "full"])
        model = transformers.GlmMoeDsaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    nn.init.normal_(model.model.embed_tokens.weight)
    return model.eval()


def prompt(length, batch=1, padding=0):
    """Tokens and mask; the last request of the batch begins with `padding` pads."""
    ids = torch.randint(1, SIZES["vocab_size"], (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model, inputs, new, **options):
    torch.manual_seed(3)  # for sampling
    tokens = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, **{"do_sample": False, **options})
    return tokens[:, inputs["input_ids"].shape[1] :]


@torch.no_grad()
def logits(model, inputs, **options):
    return model(**inputs, **options).logits
