"""The rotations of the model layer, against the matrices that they are and against transformers' own functions."""

import importlib

import pytest
import torch

from keysift.rotation import hadamard, rope

DEEPSEEK, GLM = (f"transformers.models.{name}.modeling_{name}" for name in ("deepseek_v32", "glm_moe_dsa"))


def sylvester(n):
    """The Hadamard matrix by its definition: entry (i, j) is the parity of the bits that i and j share."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 8, 128])
def test_hadamard_is_the_matrix_of_that_name(n):
    x = torch.randn(3, 2, n)
    wanted = x.double() @ sylvester(n) / n**0.5
    bound = (n.bit_length() + 2) * 2.0**-24 * x.double().abs().sum(-1, keepdim=True) / n**0.5
    assert ((hadamard(x).double() - wanted).abs() <= bound).all()


def test_hadamard_keeps_dot_products_and_undoes_itself():
    q, k = torch.randn(4, 128, dtype=torch.float32), torch.randn(5, 128)
    bound = 32 * 2.0**-24 * q.norm(dim=1)[:, None] * k.norm(dim=1)
    assert ((hadamard(q) @ hadamard(k).T - q @ k.T).abs() <= bound).all()
    assert ((hadamard(hadamard(q)) - q).abs() <= 32 * 2.0**-24 * q.norm(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hadamard_rounds_once(dtype):
    x = torch.randn(6, 64).to(dtype)
    assert torch.equal(hadamard(x), hadamard(x.float()).to(dtype))


def test_hadamard_takes_parts_of_tensors_and_changes_nothing():
    whole = torch.randn(3, 40)
    before, part = whole.clone(), whole[:, 3:35]
    assert torch.equal(hadamard(part), hadamard(part.contiguous()))
    assert torch.equal(whole, before)
    assert hadamard(whole[:0, :32]).shape == (0, 32)


def test_an_outlier_costs_the_others_less_after_hadamard():
    """What it is for: with one scale a token, a value of 300 leaves no bits for values of 0.01."""
    x = torch.full((1, 128), 0.01)
    x[0, 5] = 300.0
    assert hadamard(x).abs().amax() < x.abs().amax() / 10


@pytest.mark.parametrize("n", [0, 3, 96])
def test_hadamard_refuses_what_is_no_power_of_two(n):
    with pytest.raises(ValueError, match=f"x has {n} values"):
        hadamard(torch.zeros(2, n))


@pytest.mark.parametrize(("interleaved", "turned"), [(False, [0, 0, 1, 0]), (True, [0, 1, 0, 0])])
def test_rope_turns_the_partner_of_a_one_hot_vector(interleaved, turned):
    """A quarter turn of the first pair: its second value is beside the first, or half a row away."""
    x, cos, sin = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    assert rope(x, cos, sin, interleaved=interleaved).tolist() == turned


def test_rope_refuses_an_odd_number():
    with pytest.raises(ValueError, match="x has 3 values"):
        rope(torch.zeros(3), torch.ones(1), torch.ones(1), interleaved=True)


def angles(rows, n, dtype):
    """cos and sin as a model has them, both halves the same."""
    angle = torch.rand(1, rows, n // 2) * 100
    return torch.cat((angle.cos(),) * 2, -1).to(dtype), torch.cat((angle.sin(),) * 2, -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_split_is_bit_for_bit_what_the_indexer_of_v32_does(dtype):
    q, k = torch.randn(1, 7, 4, 64).to(dtype), torch.randn(1, 7, 1, 64).to(dtype)
    cos, sin = angles(7, 64, dtype)
    wanted = importlib.import_module(DEEPSEEK).apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for x, right in zip((q, k), wanted, strict=True):
        found = rope(x, cos[..., :32].unsqueeze(2), sin[..., :32].unsqueeze(2), interleaved=False)
        assert torch.equal(found, right)


@pytest.mark.parametrize("module", [DEEPSEEK, GLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_interleaved_is_bit_for_bit_what_transformers_does_but_for_the_order(module, dtype):
    """transformers leaves first halves of the pairs, then second ones; here a pair stays where it was."""
    q, k = torch.randn(1, 7, 4, 64).to(dtype), torch.randn(1, 7, 1, 64).to(dtype)
    cos, sin = angles(7, 64, dtype)
    wanted = importlib.import_module(module).apply_rotary_pos_emb_interleave(q, k, cos, sin, unsqueeze_dim=2)
    for x, right in zip((q, k), wanted, strict=True):
        found = rope(x, cos[..., :32].unsqueeze(2), sin[..., :32].unsqueeze(2), interleaved=True)
        assert torch.equal(torch.cat((found[..., 0::2], found[..., 1::2]), -1), right)
        assert not torch.equal(found, right)
