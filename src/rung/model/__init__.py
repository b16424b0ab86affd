"""Models: a table of weights and a pure function of them.

Arrays are named with their shape. The letters, wherever they appear:

    B  sequences of the batch      H  query heads                F  width of the MLP
    T  positions (queries)         G  key and value heads        V  vocabulary
    S  positions (keys)            R  query heads per key head   L  layers
    D  d_model                     K  width of one head          P  rows of the position table
"""

from __future__ import annotations

from rung.model.decoder import Decoder
from rung.model.weights import Weight, WeightTable

__all__ = ["Decoder", "Weight", "WeightTable"]
