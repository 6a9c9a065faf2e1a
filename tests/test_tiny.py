"""The product in a minute: the whole flow on inputs small enough to work by hand, and a model that decodes through it.

Five earlier tokens, two index heads with weights 1 and 1/2. The heads' dot products, cut at zero and weighted:
    token 0:  relu( 2) * 1 + relu(-1) / 2 = 2
    token 1:  relu(-3) * 1 + relu( 4) / 2 = 2
    token 2:  relu( 1) * 1 + relu( 1) / 2 = 1.5
    token 3:  relu( 0) * 1 + relu(-5) / 2 = 0
    token 4:  relu( 4) * 1 + relu( 2) / 2 = 5
The two best are 4 and, as the lower of two equals, 0. Attention over them has the logits ln 2 and 0, so weights 2/3 and
1/3 on the values 3 and 6: 2/3 * 3 + 1/3 * 6 = 4, and lse = ln(2 + 1).
"""

import math

import pytest
import torch

import keysift
from keysift.step import decode_step

INDEX_Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # [1, H, d]
WEIGHTS = torch.tensor([[1.0, 0.5]])
INDEX_K = torch.tensor([[2.0, -1.0], [-3.0, 4.0], [1.0, 1.0], [0.0, -5.0], [4.0, 2.0]])
SCORES = torch.tensor([[2.0, 2.0, 1.5, 0.0, 5.0]])

Q = torch.tensor([[[0.0, 1.0]]])  # [1, heads, value + rope]
LATENTS = torch.tensor([[6.0, 0.0], [9.0, 7.0], [9.0, 7.0], [9.0, 7.0], [3.0, math.log(2)]])

# Tokens 0 and 1 lie in page 2, tokens 2 and 3 in page 0, token 4 in page 1 with one place free.
BLOCK_TABLE = torch.tensor([[2, 0, 1]])
PLACES = torch.tensor([4, 5, 0, 1, 2])

KERNELS = pytest.mark.parametrize("kernel", ["cpu", "reference"])


def paged(tokens):
    """Pages of two tokens; the place that no token has holds NaN."""
    pages = torch.full((6, tokens.shape[1]), torch.nan)
    pages[PLACES] = tokens
    return pages.view(3, 2, -1)


def indices(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@KERNELS
def test_scores(kernel):
    assert torch.equal(keysift.index_scores(INDEX_Q, INDEX_K, None, WEIGHTS, kernel=kernel), SCORES)


@KERNELS
def test_scores_of_quantised_keys_are_scaled_per_key(kernel):
    scale = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1])
    scores = keysift.index_scores(INDEX_Q, INDEX_K, scale, WEIGHTS, kernel=kernel)
    torch.testing.assert_close(scores, torch.tensor([[2.0, 1.0, 3.0, 0.0, 0.5]]), rtol=1e-6, atol=0)


@KERNELS
def test_paged_scores_read_through_the_block_table(kernel):
    scores = keysift.paged_index_scores(INDEX_Q, paged(INDEX_K), WEIGHTS, torch.tensor([5]), BLOCK_TABLE, kernel=kernel)
    assert torch.equal(scores[:, :5], SCORES)


@KERNELS
def test_select_takes_the_lower_column_among_equals(kernel):
    assert torch.equal(keysift.select(SCORES, 2, sorted=True, kernel=kernel), indices([0, 4]))


@KERNELS
def test_select_in_a_window_counts_from_its_start_or_from_column_0(kernel):
    window = {"start": torch.tensor([1]), "end": torch.tensor([4]), "sorted": True, "kernel": kernel}
    assert torch.equal(keysift.select(SCORES, 2, **window), indices([0, 1]))
    assert torch.equal(keysift.select(SCORES, 2, **window, index_base="column"), indices([1, 2]))


@KERNELS
def test_a_row_that_has_fewer_ends_with_minus_one(kernel):
    scores = torch.tensor([[torch.nan, 3.0, -torch.inf, torch.inf, -2.0]])
    result = keysift.select(scores, 4, sorted=True, return_values=True, return_counts=True, kernel=kernel)
    assert torch.equal(result[0], indices([1, 3, 4, -1]))
    assert torch.equal(result[1], torch.tensor([[3.0, torch.inf, -2.0, -torch.inf]]))
    assert torch.equal(result[2], torch.tensor([3], dtype=torch.int32))


@KERNELS
def test_prefill_and_decode_are_windows(kernel):
    two = SCORES.expand(2, 5)
    prefill = keysift.select_prefill(two, 1, torch.tensor([0, 1]), torch.tensor([4, 4]), kernel=kernel)
    assert torch.equal(prefill, indices([0], [0]))  # token 0, and token 1 counted from 1
    decode = keysift.select_decode(two, 1, torch.tensor([5]), next_n=2, kernel=kernel)
    assert torch.equal(decode, indices([0], [4]))  # the first of two new tokens does not see the second


@KERNELS
def test_select_gives_slots(kernel):
    slots = keysift.select(SCORES, 2, page_table=BLOCK_TABLE, page_size=2, sorted=True, kernel=kernel)
    assert torch.equal(slots, indices([4, 2]))  # tokens 0 and 4


@KERNELS
def test_attention_over_the_selection(kernel):
    out, lse = keysift.sparse_mla(Q, LATENTS, indices([0, -1, 4]), 1.0, value_dim=1, kernel=kernel)
    torch.testing.assert_close(out, torch.tensor([[[4.0]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(3)]]))


def test_one_decode_step():
    out = decode_step(
        Q,
        paged(LATENTS),
        INDEX_Q,
        paged(INDEX_K),
        WEIGHTS,
        torch.tensor([5]),
        BLOCK_TABLE,
        topk=2,
        scale=1.0,
        value_dim=1,
    )
    torch.testing.assert_close(out, torch.tensor([[[4.0]]]))


def test_the_indexer_joins_scores_and_selection():
    ends = torch.tensor([4])
    assert torch.equal(keysift.index_prefill(INDEX_Q, INDEX_K, None, WEIGHTS, None, ends, 1), indices([0]))
    slots = keysift.index_decode(INDEX_Q, paged(INDEX_K), WEIGHTS, torch.tensor([5]), BLOCK_TABLE, 1, index_base="slot")
    assert torch.equal(slots, indices([2]))


def test_select_under_compile():
    def step(scores):
        return keysift.select(scores, 2, sorted=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(SCORES), indices([0, 4]))


def test_a_model_generates_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        index_n_heads=2, index_head_dim=16, index_topk=6, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    prompt = torch.randint(64, (2, 20))

    def generate():
        return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)

    stock = generate()
    assert torch.equal(
        keysift.accelerate(model).generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0), stock
    )
    keysift.restore(model)
    assert torch.equal(generate(), stock)
