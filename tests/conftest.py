"""What every test stands on: a clean environment, repeatable randomness, GPU tests only where there is a GPU."""

import os

import hypothesis
import pytest
import torch

# A developer's own settings (KEYSIFT_SELECT=reference, say) must not decide what the tests test.
for name in [name for name in os.environ if name.startswith("KEYSIFT_")]:
    del os.environ[name]

from keysift import dispatch  # noqa: E402 (after the environment)
from keysift.ops.select import api as select_api  # noqa: E402

# Triton decides at import whether it interprets or compiles, so the two cannot share a process: `make interpreter`.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]

# No deadline: a first call compiles. The blob that a failure prints repeats it.
hypothesis.settings.register_profile("keysift", deadline=None, print_blob=True)
hypothesis.settings.load_profile("keysift")


@pytest.fixture(autouse=True)
def _seed():
    """The same numbers whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_choices():
    """A test that changes a table, a plan or a kernel leaves no choice behind, and finds none."""
    caches = (dispatch._choose, dispatch._load, dispatch._warn_reference, select_api._chosen)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in without])
    items[:] = without
