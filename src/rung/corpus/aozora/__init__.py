"""Aozora Bunko: raw files as published become works: notation read, characters resolved, everything counted."""
