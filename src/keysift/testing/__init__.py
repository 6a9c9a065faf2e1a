"""The conformance kit: judges any selector, ours or another's, by the lines of CONTRACT.md.

>>> from keysift.testing import check_select, select_kernels
>>> kernels = dict(select_kernels("cpu"))
>>> check_select(kernels["reference"], tier="tiny").ok
True
"""

from .cache import cache_kernels, check_cache
from .cases import Case, cases
from .index import check_index, index_kernels
from .kit import check_select
from .report import Report
from .score import check_score, score_kernels
from .selectors import FEATURES, Selector, select_kernels
from .sparse_mla import check_sparse_mla, sparse_mla_kernels

#: The stages beside select, by name: their kernels on a device, with what each lacks there, and the judgement of one.
STAGES = {
    "cache": (cache_kernels, check_cache),
    "score": (score_kernels, check_score),
    "index": (index_kernels, check_index),
    "sparse_mla": (sparse_mla_kernels, check_sparse_mla),
}

__all__ = [
    "FEATURES",
    "STAGES",
    "Case",
    "Report",
    "Selector",
    "cache_kernels",
    "cases",
    "check_cache",
    "check_index",
    "check_score",
    "check_select",
    "check_sparse_mla",
    "index_kernels",
    "score_kernels",
    "select_kernels",
    "sparse_mla_kernels",
]
