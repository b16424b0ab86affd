"""Weights and modules from elsewhere: Hugging Face state dicts, and Flax modules trained in our harness."""
