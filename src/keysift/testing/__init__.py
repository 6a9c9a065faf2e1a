"""The conformance kit: judges any selector, ours or another's, by the lines of CONTRACT.md.

>>> from keysift.testing import check_select, select_kernels
>>> kernels = dict(select_kernels("cpu"))
>>> check_select(kernels["reference"], tier="tiny").ok
True
"""

from .cases import Case, cases
from .kit import check_select
from .report import Report
from .selectors import FEATURES, Selector, select_kernels

__all__ = ["FEATURES", "Case", "Report", "Selector", "cases", "check_select", "select_kernels"]
