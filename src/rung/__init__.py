"""Rung: language models trained from scratch in JAX."""

__version__ = "0.1.0"
