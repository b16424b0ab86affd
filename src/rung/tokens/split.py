"""Which text is held out: whole documents where there are several, the end where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rung.corpus.documents import Scan
from rung.tokens.permutation import permute

_KEY = 0x52756E67  # fixed, so that every run on a text holds the same documents out, whatever its seed
_OVERSHOOT = 1.5  # times the fraction asked, that the documents held out may come to


@dataclass(frozen=True)
class Split:
    """What is held out: the ``documents`` (by number), or the text of the only one from character ``cut`` on."""

    documents: frozenset[int] = frozenset()
    cut: int | None = None


def hold_out(scan: Scan, fraction: float) -> Split:
    """Choose what is held out of the scanned documents.

    One document: its text from character ``int(n_chars * (1 - fraction))`` on. Several: documents are gone through in
    a fixed shuffled order; each is taken that keeps the bytes held out within 1.5 times the fraction, until the
    fraction is reached. Where none fits, the smallest is taken. Never all.
    """
    if not fraction or not scan.n_documents:
        return Split()
    if scan.n_documents == 1:
        return Split(cut=int(scan.chars[0] * (1 - fraction)))
    goal = fraction * sum(scan.bytes)
    chosen, held = set(), 0
    for number in permute(np.arange(scan.n_documents), scan.n_documents, _KEY).tolist():
        if held + scan.bytes[number] <= _OVERSHOOT * goal:
            chosen.add(number)
            held += scan.bytes[number]
        if held >= goal:
            break
    if not chosen:
        chosen = {min(range(scan.n_documents), key=scan.bytes.__getitem__)}
    return Split(documents=frozenset(chosen))
