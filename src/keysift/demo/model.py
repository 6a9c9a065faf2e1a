"""The model of the demo, and the three ways to run it.

The weights are random, drawn from a seed: the time of a token does not depend on what it says, and no checkpoint of
this architecture fits a laptop.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import keysift
from keysift import indexer

#: The generic fallback differs from keysift in the selector alone.
VARIANTS = ("stock", "keysift, torch.topk", "keysift")

#: What describes the model, in words and in the configuration.
WORDS = {
    "index heads": ("index_n_heads", "index_head_dim"),
    "head dims nope/rope/v": ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "latents q, kv + rope": ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"),
    "index_topk": ("index_topk",),
    "attention heads": ("num_attention_heads",),
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "dense and expert MLP": ("intermediate_size", "moe_intermediate_size"),
    "experts, per token": ("n_routed_experts", "num_experts_per_tok"),
    "vocabulary": ("vocab_size",),
}


def build_model(context: int, heads: int, layers: int, hidden: int, seed: int) -> Any:
    """DeepSeek-V3.2 of transformers with its real head sizes and latents, on the CPU, float32, random weights."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        vocab_size=256,  # bytes
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 4,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        index_topk=2048 if context >= 4096 else max(1, context // 4),
        bos_token_id=None,
        eos_token_id=None,  # every run generates as many tokens as it was asked for
    )
    model: Any = DeepseekV32ForCausalLM(config)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    # Unit variance through every projection, instead of the library's std 0.02, which leaves the logits of an untrained
    # model nearly uniform. Attention is made to matter: sharper queries, so that it does not average 2048 keys away,
    # and as large a share of the residual stream as the embedding has.
    gain = {"q_b_proj": 2.5, "o_proj": 4.0, "down_proj": 2.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                layer = name.removesuffix(".weight").rsplit(".", 1)[-1]
                fan_in = 1 if layer == "embed_tokens" else weight.shape[-1]
                weight.normal_(0.0, gain.get(layer, 1.0) * fan_in**-0.5, generator=generator)
    return model


def scaling(model: Any) -> str:
    """What is V3.2's own and what was scaled, from the configuration itself."""
    from transformers import DeepseekV32Config

    real, ours = DeepseekV32Config(), model.config
    same: list[str] = []
    scaled: list[str] = []
    for label, names in WORDS.items():
        mine, theirs = (" x ".join(str(getattr(config, name)) for name in names) for config in (ours, real))
        (same if mine == theirs else scaled).append(f"{label} {mine}" + ("" if mine == theirs else f" (of {theirs})"))
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    return f"As in V3.2: {'; '.join(same)}.\nScaled: {'; '.join(scaled)}.\n{size:.0f} M float32 parameters, random."


def topk_select(
    scores: torch.Tensor,
    k: int,
    *,
    start: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    index_base: str = "window",
    out: torch.Tensor,
    **_: object,  # a kernel's name, and page tables, which `accelerate` does not give
) -> torch.Tensor:
    """What an engine's generic fallback does in place of `select`: mask, `torch.topk`, cast, -1."""
    with torch.profiler.record_function("keysift::select"):
        columns = scores.shape[1]
        column = torch.arange(columns, device=scores.device)
        outside = torch.zeros_like(scores, dtype=torch.bool) if end is None else column >= end[:, None]
        if start is not None:
            outside |= column < start[:, None]
        values, indices = scores.masked_fill(outside, -torch.inf).topk(min(k, columns), sorted=False)
        if start is not None and index_base == "window":
            indices -= start[:, None]
        out[:, :columns] = indices.int().masked_fill_(values == -torch.inf, -1)
        out[:, columns:] = -1
    return out


@contextlib.contextmanager
def variant(model: Any, name: str) -> Iterator[None]:
    """The model as the variant runs it; stock again afterwards."""
    if name == "stock":
        yield
        return
    keysift.accelerate(model)
    try:
        with contextlib.nullcontext() if name == "keysift" else mock.patch.object(indexer, "select", topk_select):
            yield
    finally:
        keysift.restore(model)
