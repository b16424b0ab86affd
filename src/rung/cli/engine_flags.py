"""The flags that say where heavy work is done: on this machine or on a Ray cluster, and how much at once."""

from __future__ import annotations

from typing import Any

from rung.cli.flags import Parser, typed
from rung.errors import RungError


def add_engine(parser: Parser) -> None:
    """Add the flags that say where work is done."""
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: this machine; ray: a Ray cluster, RAY_ADDRESS or one on this machine (extra ray)",
    )
    parser.add_argument("--workers", metavar="N", help="tasks at once; the result does not depend on it (default: all)")


def workers_of(parsed: Any) -> int:
    """Return how many workers are asked for, 0 for as many as there are cores."""
    workers = typed("--workers", int, parsed.workers) if parsed.workers is not None else 0
    if parsed.workers is not None and workers < 1:
        raise RungError(f"--workers is {parsed.workers}", "ask for 1 at least, or leave it out for all cores")
    return workers
