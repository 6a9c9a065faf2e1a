"""Imports the package before pytest imports one of its files for its doctests, which would be a second copy."""

import keysift  # noqa: F401
