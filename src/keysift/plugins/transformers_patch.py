"""DSA models of Hugging Face transformers through keysift: `accelerate` and `restore`.

Stock transformers expands every cached latent into full keys and values for every new token, scores, and then masks
all but the selected ones. Here the cache keeps the latents, and attention reads only those that were selected, in
absorbed form: the key up-projection is folded into the query, the value up-projection comes after the sum. Everything
else of the model (projections, norms, rotary embedding, experts, cache classes, generation) stays its own.

In a cache layer, `keys` holds [B, 1, T, latent + rope], `values` is empty, and the indexer's slot holds the index keys.
"""

import functools
import importlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from keysift import indexer
from keysift.ops.score.api import KERNELS as SCORE_KERNELS
from keysift.ops.select.api import KERNELS as SELECT_KERNELS
from keysift.ops.sparse_mla.api import KERNELS as SPARSE_MLA_KERNELS
from keysift.ops.sparse_mla.api import sparse_mla
from keysift.plugins import fp8_index

#: Model classes served, and the model's own function that pairs the rotary dimensions of its indexer.
MODELS = {
    "DeepseekV32ForCausalLM": "apply_rotary_pos_emb",  # half-split
    "GlmMoeDsaForCausalLM": "apply_rotary_pos_emb_interleave",
}
STAGES = {"score": SCORE_KERNELS, "select": SELECT_KERNELS, "sparse_mla": SPARSE_MLA_KERNELS}
INDEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *fp8_index.FORMATS)
#: Bytes of absorbed queries and their outputs at a time during prefill.
ATTEND_BUDGET = 128 << 20


def accelerate(
    model: Any, *, kernel: str | Mapping[str, str] | None = None, index_dtype: torch.dtype | None = None
) -> Any:
    """Run the attention of a DSA model through keysift, in place.

    model        a DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM of transformers, in eval mode when it is called
    kernel       None: the dispatch chooses; a name: the kernel of select; a mapping of stage ("score", "select",
                 "sparse_mla") to kernel name
    index_dtype  dtype of the cached index keys: float32, bfloat16, float16, float8_e4m3fn (float8_e4m3fnuz on MI300);
                 default the model's own, which keeps the selection that of stock transformers. In fp8 the queries are
                 fp8 too, both after a Hadamard rotation, as V3.2 is served

    Returns the model. No weight is copied, `state_dict` and checkpoints are untouched, `restore` undoes it, a second
    call replaces the options. Caches filled by stock transformers cannot be continued, nor the other way round.
    Raises TypeError for another model class, ValueError for a model whose `kv_b_proj` is not a plain linear layer
    (quantised, adapted, sharded or hooked) or an unknown kernel; the model is then unchanged.

    Equivalent to: the model itself, up to float32 rounding. Where two index scores at the boundary of the selection
    differ by less than rounding (exact zeros of the ReLU among them), either key may be selected, as in stock
    transformers.
    """
    rotary = MODELS[_model_class(model)]
    kernels = _kernels(kernel)
    if index_dtype is not None and index_dtype not in INDEX_DTYPES:
        raise ValueError(
            f"index_dtype is {index_dtype}; it may be None or {', '.join(str(dtype) for dtype in INDEX_DTYPES)}"
        )
    attentions = _attentions(model)
    for attention in attentions:
        _up_projections(attention)
        if index_dtype in fp8_index.FORMATS and attention.indexer is not None:
            fp8_index.layout(index_dtype, attention.indexer.head_dim)  # refuses what no fp8 page holds
        if "forward" in vars(attention) and not hasattr(attention, "_keysift"):
            raise ValueError(
                f"the forward method of attention layer {attention.layer_idx} has been replaced by another library; "
                "accelerate needs the class's own"
            )
    module = importlib.import_module(type(attentions[0]).__module__)
    options = _Options(module.apply_rotary_pos_emb_interleave, getattr(module, rotary), kernels, index_dtype)
    for attention in attentions:
        attention._keysift = options
        attention.forward = functools.partial(_forward, attention)  # unlike a bound method, it can be pickled
    return model


def restore(model: Any) -> Any:
    """Undo `accelerate`: every attention layer runs its class's own forward again. A stock model is left as it is.

    model  a DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM of transformers
    Returns the model. Raises TypeError for another model class.
    """
    _model_class(model)
    for attention in _attentions(model):
        if hasattr(attention, "_keysift"):
            del attention.forward, attention._keysift
    return model


def _model_class(model: Any) -> str:
    for cls in type(model).__mro__:
        if cls.__name__ in MODELS and cls.__module__.startswith("transformers."):
            return cls.__name__
    raise TypeError(
        f"model is {type(model).__module__}.{type(model).__name__}; it may be transformers' {' or '.join(MODELS)}"
    )


def _attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def _kernels(kernel: str | Mapping[str, str] | None) -> dict[str, str | None]:
    if not (kernel is None or isinstance(kernel, str | Mapping)):
        raise TypeError(f"kernel is {type(kernel).__name__}; it may be None, a name, or a mapping of stage to name")
    named: Mapping[str, str] = {} if kernel is None else {"select": kernel} if isinstance(kernel, str) else kernel
    for stage, name in named.items():
        if stage not in STAGES:
            raise ValueError(f"kernel names the stage {stage!r}; it may name {', '.join(STAGES)}")
        if name not in (names := [row.name for row in STAGES[stage]]):
            raise ValueError(f"kernel is {name!r} for {stage}; it may be {', '.join(names)}")
    return {stage: named.get(stage) for stage in STAGES}


@dataclass
class _Options:
    """What the layers of one accelerated model share."""

    rotate: Any  # the model's function for attention
    rotate_index: Any  # the model's function for the indexer
    kernels: dict[str, str | None]
    index_dtype: torch.dtype | None
    windows: "_Windows" = field(default_factory=lambda: _Windows())  # noqa: PLW0108 (defined below)


class _Windows:
    """The windows of an attention mask, found once for all layers of a forward.

    The last mask is known by a weak reference and its version, so what is returned is always that mask's own windows,
    whichever thread asks; a copied or pickled model starts without.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, None]:
        return {"_last": None}

    def of(self, mask: Any, batch: int, tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[start, end) of every query token, int32 [batch * tokens] each."""
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[1:] != (1, tokens, columns):
            given = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask reaches the attention as {given}; it must be [{batch}, 1, {tokens}, {columns}], as "
                "transformers makes it for the attention implementations 'sdpa' and 'eager'"
            )
        if torch.compiler.is_compiling() or mask.is_inference():  # neither has a version to compare
            return _windows(mask, batch)
        last = self._last
        if last is not None and last[0]() is mask and last[1] == mask._version:
            return last[2]
        windows = _windows(mask, batch)
        self._last = (weakref.ref(mask), mask._version, windows)
        return windows


def _windows(mask: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [B, 1, S, T], true or 0 where a query attends, as one range of columns per query."""
    mask = mask[:, 0].expand(batch, -1, -1)
    if mask.dtype == torch.bool:
        allowed, legal = mask, None
    else:
        allowed = mask == 0
        legal = (allowed | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    ones = allowed.to(torch.uint8)
    start = ones.argmax(-1)  # the first column attended
    last = ones.shape[-1] - 1 - ones.flip(-1).argmax(-1)
    count = ones.sum(-1)
    single = (count == 0) | (last - start + 1 == count)
    legal = single.all() if legal is None else single.all() & legal
    message = (
        "attention_mask is not one range of columns per query token (causal, with or without padding, packed or not); "
        "keysift serves no other mask. generate() without attention_mask masks every pad token of the prompt, also in "
        "its middle: give attention_mask"
    )
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(legal, message)
    elif not bool(legal):
        raise ValueError(message)
    return start.flatten().int(), (start + count).flatten().int()


def _up_projections(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of kv_b_proj's weight: keys [heads, nope, latent] and values [heads, latent, v]."""
    linear = attention.kv_b_proj
    problems = [
        *([] if type(linear) is nn.Linear else [f"is a {type(linear).__module__}.{type(linear).__name__}"]),
        *(["has a forward hook or a replaced forward"] if _is_hooked(linear) else []),
        *([] if type(getattr(linear, "weight", None)) is nn.Parameter else ["has no plain weight"]),
        *([f"is {linear.weight.dtype}"] if getattr(linear.weight, "dtype", None) == torch.float64 else []),
        *(["has a bias"] if getattr(linear, "bias", None) is not None else []),
    ]
    if problems:
        raise ValueError(
            f"kv_b_proj of attention layer {attention.layer_idx} {' and '.join(problems)}; keysift folds its weight "
            "into the query, so it must be a plain torch.nn.Linear without bias (dequantised, adapters merged, "
            "not sharded)"
        )
    nope, value = attention.qk_nope_head_dim, attention.v_head_dim
    weight = linear.weight.view(-1, nope + value, attention.kv_lora_rank)
    return weight[:, :nope], weight[:, nope:].transpose(1, 2)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class _ForwardOnly(torch.autograd.Function):
    """The identity, which refuses to be differentiated: gradients through the selection would be missing, not zero."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("an accelerated model has no backward pass; call keysift.restore(model) to train")


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    prev_topk_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The forward of an attention layer. transformers calls the cache `cache`, before 5.24 `past_key_values`."""
    if self.training:
        raise RuntimeError(
            "an accelerated model serves inference only; call model.eval(), or keysift.restore(model) to train"
        )
    if kwargs.get("output_attentions") or self.config.output_attentions:
        raise ValueError(
            "output_attentions is set; an accelerated model never holds the attention weights of all columns"
        )
    options: _Options = self._keysift
    cache = past_key_values if cache is None else cache
    batch, tokens = hidden_states.shape[:2]
    latent_dim, rope_dim = self.kv_lora_rank, self.qk_rope_head_dim
    cos, sin = position_embeddings

    q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
    q = self.q_b_proj(q_resid).view(batch, tokens, -1, self.qk_head_dim)
    q_nope, q_rope = q.split([self.qk_nope_head_dim, rope_dim], dim=-1)
    latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([latent_dim, rope_dim], dim=-1)
    latent = self.kv_a_layernorm(latent)
    q_rope, k_rope = options.rotate(q_rope, k_rope.unsqueeze(2), cos, sin, unsqueeze_dim=2)
    kv = torch.cat((latent, k_rope.squeeze(2)), dim=-1).unsqueeze(1)  # [B, 1, S, latent + rope]
    if cache is not None:
        _check_cache(cache, self.layer_idx, kv)
        kv, _ = cache.update(kv, kv.new_empty(batch, 1, tokens, 0), self.layer_idx)

    with torch.no_grad():
        if self.indexer is not None:
            windows = options.windows.of(attention_mask, batch, tokens, kv.shape[2])
            columns = _index(self.indexer, options, hidden_states, q_resid, position_embeddings, cache, windows)
        elif prev_topk_indices is None:
            raise ValueError(f"attention layer {self.layer_idx} shares a selection, but no earlier layer has made one")
        else:
            columns = prev_topk_indices
        output = _attend(self, options, q_nope.flatten(0, 1), q_rope.flatten(0, 1), kv, columns)
    if torch.is_grad_enabled():
        output = _ForwardOnly.apply(output, q, kv)  # type: ignore[no-untyped-call]
    output = self.o_proj(output.view(batch, tokens, -1))
    return (output, None, columns) if hasattr(self, "skip_topk") else (output, None)


def _check_cache(cache: Any, layer_idx: int, kv: torch.Tensor) -> None:
    """Refuse to continue a cache that somebody else filled: stock transformers keeps other tensors in it."""
    keys = getattr(cache.layers[layer_idx], "keys", None) if layer_idx < len(cache.layers) else None
    if keys is not None and keys.numel() and (keys.shape[1] != 1 or keys.shape[3] != kv.shape[3]):
        raise ValueError(
            f"the cache of layer {layer_idx} holds keys {list(keys.shape)}, not [.., 1, .., {kv.shape[3]}]: it was "
            "filled or laid out by stock transformers; begin with a new cache after accelerate or restore"
        )


def _index(
    module: Any,
    options: _Options,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    windows: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The selected columns [B, S, topk] of every query token, -1 where there are fewer."""
    batch, tokens = hidden_states.shape[:2]
    cos, sin = position_embeddings
    sizes = [module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim]
    q_rope, q_rest = module.wq_b(q_resid).view(batch, tokens, module.n_heads, module.head_dim).split(sizes, dim=-1)
    k_rope, k_rest = module.k_norm(module.wk(hidden_states)).unsqueeze(2).split(sizes, dim=-1)
    q_rope, k_rope = options.rotate_index(q_rope, k_rope, cos, sin, unsqueeze_dim=2)
    q = torch.cat((q_rope, q_rest), dim=-1)  # [B, S, H, D]
    k = torch.cat((k_rope, k_rest), dim=-1).squeeze(2)
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float()
    weights = weights * (module.n_heads**-0.5 * module.softmax_scale)
    narrow = options.index_dtype if options.index_dtype in fp8_index.FORMATS else None
    if narrow is not None:
        q, weights = fp8_index.queries(q, weights, narrow)
    k = k.to(options.index_dtype or k.dtype) if narrow is None else fp8_index.keys(k, narrow)
    if cache is not None:
        k = cache.update_indexer(k, module.layer_idx)  # [B, T, D]; fp8: bytes [B, T, D + 4]

    topk = min(module.index_topk, k.shape[1])
    starts, ends = windows
    columns = torch.empty(batch, tokens, topk, dtype=torch.int32, device=q.device)
    kernels: dict[str, Any] = {"score_kernel": options.kernels["score"], "select_kernel": options.kernels["select"]}
    kernels["index_base"] = "column"
    if tokens == 1:
        # A cache in one piece per request is a paged cache of one page each; fp8 keys are pages of one token.
        layout = None if narrow is None else fp8_index.layout(narrow, module.head_dim)
        pages = k if layout is None else k.reshape(-1, 1, layout.width)
        table = torch.arange(pages.shape[0], dtype=torch.int32, device=q.device).view(batch, -1)
        indexer.index_decode(
            q[:, 0], pages, weights[:, 0], ends, table, topk, layout=layout, starts=starts, out=columns[:, 0], **kernels
        )
        return columns
    for b in range(batch):
        part = slice(b * tokens, (b + 1) * tokens)
        keys, scale = (k[b], None) if narrow is None else fp8_index.split(k[b], narrow)
        indexer.index_prefill(q[b], keys, scale, weights[b], starts[part], ends[part], topk, out=columns[b], **kernels)
    return columns


def _attend(
    module: Any, options: _Options, q_nope: torch.Tensor, q_rope: torch.Tensor, kv: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Attention [B * S, heads * v] of q_nope [B * S, heads, nope], q_rope [B * S, heads, rope] over kv [B, 1, T, D]."""
    to_latent, to_value = _up_projections(module)
    rows, heads, _ = q_nope.shape
    batch, _, length, dim = kv.shape
    first_slot = torch.arange(0, batch * length, length, dtype=torch.int32, device=kv.device)[:, None, None]
    slots = torch.where(columns < 0, columns, columns + first_slot).view(rows, -1)
    latents = kv.reshape(batch * length, dim)
    output = kv.new_empty(rows, heads, module.v_head_dim)
    chunk = max(1, ATTEND_BUDGET // (heads * (dim + module.kv_lora_rank) * kv.element_size()))
    for first in range(0, rows, chunk):
        part = slice(first, first + chunk)
        absorbed = torch.bmm(q_nope[part].transpose(0, 1), to_latent).transpose(0, 1)  # [rows, heads, latent]
        query = torch.cat((absorbed, q_rope[part]), dim=-1)
        summed, _ = sparse_mla(
            query,
            latents,
            slots[part],
            module.scaling,
            value_dim=module.kv_lora_rank,
            kernel=options.kernels["sparse_mla"],
        )
        output[part] = torch.bmm(summed.transpose(0, 1), to_value).transpose(0, 1)
    return output.flatten(1)
