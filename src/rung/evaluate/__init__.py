"""Evaluation: what a model has learned, in numbers that compare."""
