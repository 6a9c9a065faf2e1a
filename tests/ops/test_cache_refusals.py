"""What cache refuses: the argument is named, and nothing is written."""

import os
import subprocess
import sys

import pytest
import torch

from keysift import dispatch
from keysift.layout import IndexLayout, LatentLayout
from keysift.ops.cache import gather_index_cache, gather_latent_cache, write_index_cache

LAYOUT = IndexLayout("e4m3fn", 4, 8)
CACHE = torch.zeros(2, 4, 12, dtype=torch.uint8)
K, SLOTS, TABLE, ENDS = torch.zeros(3, 8), torch.arange(3), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0, 5])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: write_index_cache(K, CACHE, SLOTS, LatentLayout()), TypeError, "layout is LatentLayout"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("e4m3fn", 2, 8)), ValueError, "cache has shape"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("bfloat16", 4, 12)), TypeError, "cache is torch.uint8"),
        (lambda: write_index_cache(K, CACHE[:, :, ::2], SLOTS, LAYOUT), ValueError, "cache has shape"),
        (lambda: write_index_cache(K, CACHE, SLOTS, IndexLayout("e4m3fn", 4, 8, page_stride=64)), ValueError, "apart"),
        (lambda: write_index_cache(K[:, :4], CACHE, SLOTS, LAYOUT), ValueError, "k has shape"),
        (lambda: write_index_cache(K.double(), CACHE, SLOTS, LAYOUT), TypeError, "k is torch.float64"),
        (lambda: write_index_cache(K, CACHE, SLOTS[:2], LAYOUT), ValueError, r"slot_mapping has shape \[2\]"),
        (lambda: write_index_cache(K, CACHE, SLOTS.float(), LAYOUT), TypeError, "slot_mapping is torch.float32"),
        (lambda: write_index_cache(K, CACHE, SLOTS, LAYOUT, kernel="triton"), ValueError, "cannot run this cache"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS[:1], 5, LAYOUT), ValueError, "cu_seqlens has shape"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS, -1, LAYOUT), ValueError, "tokens is -1"),
        (lambda: gather_index_cache(CACHE, TABLE, ENDS, 5, LAYOUT, out=K), TypeError, "out is torch.float32"),
        (lambda: gather_latent_cache(K[None], SLOTS, LatentLayout("float32", 3, 6, 2), dtype=torch.int8), TypeError,
         "dtype is torch.int8"),
        (lambda: IndexLayout("e5m2"), ValueError, "format is 'e5m2'"),
        (lambda: IndexLayout(scale="bf16"), ValueError, "scale is 'bf16'"),
        (lambda: IndexLayout(page_size=0), ValueError, "page_size is 0"),
        (lambda: IndexLayout(head_dim=6), ValueError, "head_dim is 6"),
        (lambda: LatentLayout("e4m3fn", value_dim=64), ValueError, "value_dim and rope_dim are 64"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument_and_write_nothing(call, error, words):
    before = CACHE.clone()
    if "cannot run" in words and dispatch.TRITON_INTERPRETS:
        pytest.skip("Triton runs here")
    with pytest.raises(error, match=words):
        call()
    assert torch.equal(CACHE, before)


def test_keysift_check_names_the_first_bad_slot():
    code = """
import torch
from keysift.layout import IndexLayout
from keysift.ops.cache import gather_index_cache, write_index_cache
layout = IndexLayout("e4m3fn", 4, 8)
cache = torch.zeros(2, 4, 12, dtype=torch.uint8)
table = torch.tensor([[0, 5]])
for call in (
    lambda: write_index_cache(torch.ones(3, 8), cache, torch.tensor([7, -1, 8]), layout),
    lambda: gather_index_cache(cache, table, torch.tensor([0, 5]), 5, layout),
    lambda: gather_index_cache(cache, table, torch.tensor([0, 9]), 9, layout),
    lambda: gather_index_cache(cache, table, torch.tensor([0, 4]), 3, layout),
):
    try:
        call()
    except ValueError as error:
        print(error, bool(cache.any()))
write_index_cache(torch.ones(3, 8), cache, torch.tensor([7, -1, 0]), layout)
gather_index_cache(cache, table, torch.tensor([0, 4]), 4, layout)
print("passes")
"""
    environment = {**os.environ, "KEYSIFT_CHECK": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    lines = run.stdout.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "slot_mapping[2] is 8",
        "block_table[0, 1] is 5",
        "cu_seqlens[1] is 9",
        "cu_seqlens[1] is 4",
        "passes",
    ]
    assert all(line.endswith("False") for line in lines[:-1])
