"""A stack of DSA attention layers, as one rank of a tensor-parallel group holds them, one decode step at a time.

What `keysift bench tpot` times: norms, projections, rotary embedding, cache write, score, select, sparse_mla, output.
Not in it: experts, all-reduce, sampling. Weights and cache contents are random, from a seed: the time of a step does
not depend on what it says.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from keysift.benchmarks.selectors import topk
from keysift.layout import FLOOR, LARGEST, IndexLayout, LatentLayout
from keysift.ops.cache import write_index_cache, write_latent_cache
from keysift.ops.score import paged_index_scores
from keysift.ops.select import select
from keysift.ops.sparse_mla import sparse_mla_decode
from keysift.rotation import hadamard, rope

#: The parts of a layer in order; "project" is everything before the caches, "output" everything after attention.
STAGES = ("project", "cache", "score", "select", "sparse_mla", "output")
PAGE_SIZE = 64

#: scores [B, N], lengths [B], block table [B, P], k -> slots [B, k]
Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """Published dimensions of a model's attention."""

    layers: int
    hidden: int
    heads: int
    q_latent: int
    latent: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    topk: int
    index_interleaved: bool  # how the indexer's rotary dimensions pair


MODELS = {
    "deepseek-v3.2": Model(61, 7168, 128, 1536, 512, 128, 64, 128, 64, 128, 2048, False),
    "glm-5": Model(78, 6144, 64, 2048, 512, 192, 64, 256, 32, 128, 2048, True),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer's, [out, in] as torch.nn.Linear has them."""

    q_a: torch.Tensor
    q_b: torch.Tensor
    kv_a: torch.Tensor
    to_latent: torch.Tensor  # [heads, nope, latent]: the key up-projection, folded into the query
    to_value: torch.Tensor  # [heads, latent, value]
    out: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    index_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """The caches of one layer."""

    index: torch.Tensor
    latent: torch.Tensor


class Stack:
    """Layers, their caches, and the buffers of a step.

    dims     of the model; `heads` of them are this rank's
    layers   how many; fewer than the model's scale it down
    batch    requests, each of `context` cached tokens, with room for `steps` more
    memory   bytes for caches: where they do not suffice for every layer, layers take turns on fewer
    """

    def __init__(
        self, dims: Model, heads: int, layers: int, batch: int, context: int, steps: int, device: torch.device,
        memory: int, seed: int = 0,
    ) -> None:  # fmt: skip
        self.dims, self.heads, self.batch, self.device = dims, heads, batch, device
        cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.index_layout = IndexLayout("e4m3fn" if cuda else "float32", PAGE_SIZE, dims.index_dim)
        scale = "ue8m0" if cuda else "float32"  # what every kernel of fp8 latents takes
        self.latent_layout = LatentLayout(
            "e4m3fn" if cuda else "float32", PAGE_SIZE, dims.latent, dims.rope, scale=scale
        )
        self.generator = torch.Generator(device).manual_seed(seed)

        per_request = -(-(context + steps) // PAGE_SIZE)
        pages = batch * per_request
        size = pages * PAGE_SIZE * sum(
            layout.width * layout.dtype.itemsize for layout in (self.index_layout, self.latent_layout)
        )  # fmt: skip
        self.cache_sets = max(1, min(layers, memory // size))
        self.caches = [self._pages(pages) for _ in range(self.cache_sets)]
        self.weights = [self._weights() for _ in range(layers)]
        # Every request's pages lie scattered over the pool.
        order = torch.randperm(pages, generator=self.generator, device=device)
        self.table = order.view(batch, per_request).int()

        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.hidden = self._normal(batch, dims.hidden)
        self.embedding = self.hidden.clone()
        self.scores = torch.empty(batch, per_request * PAGE_SIZE, dtype=torch.float32, device=device)
        angles = torch.outer(
            torch.arange(context + steps + 1, device=device),
            10000.0 ** -(torch.arange(0, dims.rope, 2, device=device) / dims.rope),
        )
        # Norms, angles and casts of a token are some sixty launches otherwise; engines fuse them too.
        self.project = torch.compile(project, dynamic=False, fullgraph=True) if cuda else project
        self.turn = hadamard(torch.eye(dims.index_dim, device=device)) if self.index_layout.is_fp8 else None
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def begin(self) -> None:
        """The token's embedding, its place in the caches, and its rotary angles: once for all layers."""
        self.lengths += 1
        position = (self.lengths - 1).long()
        page = self.table.gather(1, (position // PAGE_SIZE)[:, None])[:, 0]
        self.slots = page * PAGE_SIZE + position % PAGE_SIZE
        self.angles = self.cos[position], self.sin[position]
        self.hidden.copy_(self.embedding)

    def run(self, layer: int, stage: str, choose: Select) -> None:
        """One stage of one layer, on what the stages before it left behind."""
        weights, pages = self.weights[layer], self.caches[layer % self.cache_sets]
        if stage == "project":
            self._project(weights)
        elif stage == "cache":
            write_index_cache(self.index_k, pages.index, self.slots, self.index_layout)
            write_latent_cache(self.kv, pages.latent, self.slots, self.latent_layout)
        elif stage == "score":
            paged_index_scores(
                self.index_q, pages.index, self.index_weights, self.lengths, self.table,
                layout=self.index_layout, out=self.scores,
            )  # fmt: skip
        elif stage == "select":
            self.selected = choose(self.scores, self.lengths, self.table, self.dims.topk)
        elif stage == "sparse_mla":
            scale = (self.dims.nope + self.dims.rope) ** -0.5
            self.attended, _ = sparse_mla_decode(
                self.q[:, None], pages.latent, self.selected[:, None], scale,
                value_dim=self.dims.latent, layout=self.latent_layout,
            )  # fmt: skip
        else:
            value = torch.bmm(self.attended[:, 0].transpose(0, 1), weights.to_value).transpose(0, 1)
            self.hidden += functional.linear(value.flatten(1), weights.out)

    def _project(self, weights: Weights) -> None:
        self.q, self.kv, self.index_q, self.index_k, self.index_weights = self.project(
            self.dims,
            self.heads,
            weights,
            self.hidden,
            *self.angles,
            self.turn,
        )

    def _normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype) * std

    def _weights(self) -> Weights:
        dims, heads = self.dims, self.heads

        def linear(rows: int, columns: int) -> torch.Tensor:
            return self._normal(rows, columns, std=columns**-0.5)

        return Weights(
            linear(dims.q_latent, dims.hidden),
            linear(heads * (dims.nope + dims.rope), dims.q_latent),
            linear(dims.latent + dims.rope, dims.hidden),
            self._normal(heads, dims.nope, dims.latent, std=dims.latent**-0.5),
            self._normal(heads, dims.latent, dims.value, std=dims.latent**-0.5),
            linear(dims.hidden, heads * dims.value),
            linear(dims.index_heads * dims.index_dim, dims.q_latent),
            linear(dims.index_dim, dims.hidden),
            linear(dims.index_heads, dims.hidden),
        )

    def _pages(self, pages: int) -> Pages:
        """Caches of random tokens, written some pages at a time."""
        index = self.index_layout.empty(pages, self.device)
        latent = self.latent_layout.empty(pages, self.device)
        for first in range(0, pages * PAGE_SIZE, 1 << 18):
            slots = torch.arange(first, min(first + (1 << 18), pages * PAGE_SIZE), device=self.device)
            write_index_cache(self._normal(len(slots), self.dims.index_dim), index, slots, self.index_layout)
            write_latent_cache(
                self._normal(len(slots), self.dims.latent + self.dims.rope), latent, slots, self.latent_layout
            )
        return Pages(index, latent)


def project(
    dims: Model, heads: int, weights: Weights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    turn: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A token's hidden states [B, hidden] to queries, latents, index queries, index keys and index weights.

    turn  what index queries and keys are multiplied by where they become fp8
    """
    batch = hidden.shape[0]
    x = functional.rms_norm(hidden, (dims.hidden,))
    resid = functional.rms_norm(functional.linear(x, weights.q_a), (dims.q_latent,))
    q = functional.linear(resid, weights.q_b).view(batch, heads, dims.nope + dims.rope)
    latent, k_rope = functional.linear(x, weights.kv_a).split([dims.latent, dims.rope], -1)
    absorbed = torch.bmm(q[..., : dims.nope].transpose(0, 1), weights.to_latent).transpose(0, 1)
    q_rope = rope(q[..., dims.nope :], cos[:, None], sin[:, None], interleaved=True)
    queries = torch.cat((absorbed, q_rope), -1)  # [B, heads, latent + rope]
    latent = functional.rms_norm(latent, (dims.latent,))
    kv = torch.cat((latent, rope(k_rope, cos, sin, interleaved=True)), -1)

    index_q = functional.linear(resid, weights.index_q).view(batch, dims.index_heads, dims.index_dim)
    index_k = functional.layer_norm(functional.linear(x, weights.index_k), (dims.index_dim,))
    index_k = _rotate_index(dims, index_k, cos, sin)
    index_q = _rotate_index(dims, index_q, cos[:, None], sin[:, None])
    scale = (dims.index_heads * dims.index_dim) ** -0.5
    index_weights = functional.linear(x, weights.index_weights).float() * scale
    if turn is not None:
        # One product each, as an engine's own kernel would be one launch.
        index_q, q_scale = _quantize(index_q.float() @ turn)
        index_k = index_k.float() @ turn
        index_weights = index_weights * q_scale
    return queries, kv, index_q, index_k, index_weights


def _rotate_index(dims: Model, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x.split([dims.rope, dims.index_dim - dims.rope], -1)
    return torch.cat((rope(turned, cos, sin, interleaved=dims.index_interleaved), rest), -1)


def _quantize(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 queries and the scale of each head, which belongs into the weights."""
    scale = q.float().abs().amax(-1).clamp(min=FLOOR) / LARGEST["e4m3fn"]
    return (q / scale[..., None]).to(torch.float8_e4m3fn), scale


def select_torch(scores: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, k: int) -> torch.Tensor:
    """`torch.topk` as a generic fallback uses it: mask, top-k, cast, -1; and the slots of what it found."""
    column = torch.arange(scores.shape[1], device=scores.device)
    columns = topk(scores, column >= lengths[:, None], k)
    pages = table.gather(1, columns.clamp(min=0).long() // PAGE_SIZE)
    return (pages * PAGE_SIZE + columns % PAGE_SIZE).masked_fill_(columns < 0, -1)


def select_by(kernel: str | None) -> Select:
    """keysift's select, by the dispatch or by a kernel's name; slots come through its page table."""

    def run(scores: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, k: int) -> torch.Tensor:
        selected = select(scores, k, end=lengths, page_table=table, page_size=PAGE_SIZE, kernel=kernel)
        assert isinstance(selected, torch.Tensor)  # noqa: S101 - neither values nor counts were asked for
        return selected

    return run
