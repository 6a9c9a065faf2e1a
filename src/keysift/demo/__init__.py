"""`keysift demo`: a DSA model generates with stock transformers and with keysift."""

from .command import demo

__all__ = ["demo"]
