"""The one error that a user can cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class RungError(Exception):
    """A mistake of the user's: what is wrong and where, in one line, and the way out, in another.

    The command line prints both lines and exits with ``status``; no traceback.
    """

    status = 2

    def __init__(self, problem: str, hint: str):
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:  # so that it comes whole out of another process
        return type(self), (self.problem, self.hint)


GOES_ON = "the same command goes on from where it was"
BEGINS_AGAIN = "too little was done to keep: the same command begins again"


def note_kept(error: BaseException | None, kept: bool) -> None:
    """Note on an interrupt, for the command line to say, that there is something to go on from, where there is."""
    if kept and isinstance(error, KeyboardInterrupt):
        error.add_note(GOES_ON)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the known name most like ``name``, or all of them when none is like it."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"known names: {', '.join(known)}"
