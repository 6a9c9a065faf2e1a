"""The conformance kit: judges any selector, ours or another's, by the lines of CONTRACT.md.

>>> from keysift.testing import check_select, select_kernels
>>> kernels = dict(select_kernels("cpu"))
>>> check_select(kernels["reference"], tier="tiny").ok
True
"""

from .cache import cache_kernels, check_cache
from .cases import Case, cases
from .kit import check_select
from .report import Report
from .selectors import FEATURES, Selector, select_kernels
from .sparse_mla import check_sparse_mla, sparse_mla_kernels

#: The stages beside select, by name: their kernels on a device, with what each lacks there, and the judgement of one.
STAGES = {"cache": (cache_kernels, check_cache), "sparse_mla": (sparse_mla_kernels, check_sparse_mla)}

__all__ = [
    "FEATURES",
    "STAGES",
    "Case",
    "Report",
    "Selector",
    "cache_kernels",
    "cases",
    "check_cache",
    "check_select",
    "check_sparse_mla",
    "select_kernels",
    "sparse_mla_kernels",
]
