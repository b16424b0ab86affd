"""The command line: one module a command, which parses, calls one function, and prints.

The command is dispatched before anything heavy is imported, so that ``rung --help`` answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from rung.errors import BEGINS_AGAIN, GOES_ON, RungError, nearest
from rung.host import interrupts_heard, keep_compilations, keep_freed_memory

COMMANDS = {
    "demo": "train on six novels of Jane Austen and write a report: the whole of Rung in minutes",
    "train": "train a model on text: tokenizer, tokens, preset, training",
    "resume": "continue a run from its last checkpoint",
    "generate": "continue a prompt with a trained model",
    "runs": "list runs: state, steps, best loss",
    "compare": "overlay the curves of runs, and show how their settings differ",
    "evaluate": "held-out loss, perplexity and bits per byte of a run",
    "bench": "time the training step of a config on this machine, and what memory it takes",
    "check": "run the step again that made a run diverge, and find where it went wrong",
    "corpus": "make a corpus of text from where it is published, cleaned",
    "tokenizer": "train, use and look at tokenizers",
    "tokens": "tokenize text once, to train on it many times",
    "config": "show a preset, with overrides, and its parameter count",
}

# Preparation that can be interrupted and given again as it was. Training has a way of its own.
RESUMABLE = {"corpus": ("files", "aozora", "hub", "clean"), "tokens": ("build",)}

COMPILING = ("demo", "train", "resume", "generate", "evaluate", "check", "bench")  # what compiles models


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0 done, 1 failed, 2 the user's mistake, 3 stopped early but resumable.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    try:
        with interrupts_heard():
            status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except RungError as error:
        return _failed(arguments, error.problem, error.hint, error.status)
    except KeyboardInterrupt as interrupt:
        print(file=sys.stderr)  # below the ^C
        kept = GOES_ON in getattr(interrupt, "__notes__", ())
        said, resumable = str(interrupt) or "interrupted", _is_resumable(arguments)
        hint = (GOES_ON if kept else BEGINS_AGAIN) if resumable else "the same command begins again"
        return _failed(arguments, said, hint, 3 if resumable else 1)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.strerror is None:
            raise
        what = f"{error.filename}: " if error.filename else ""
        return _failed(arguments, f"{what}{error.strerror}", "look at the place, its permissions and the disk", 1)


def _failed(arguments: list[str], problem: str, hint: str, status: int) -> int:
    """Say what went wrong, for people and, where it was asked for, as the line of JSON; returns the status."""
    try:
        sys.stdout.flush()
        if "--json" in arguments:
            print(json.dumps({"error": problem, "hint": hint, "status": status}), flush=True)
    except BrokenPipeError:  # what went wrong is still to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"rung: {problem}", *([f"hint: {hint}"] if hint else []), sep="\n", file=sys.stderr)
    return status


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        from rung import __version__

        print(f"rung {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise RungError(f"unknown command {name!r}", nearest(name, COMMANDS))
    keep_freed_memory()
    if name in COMPILING:
        keep_compilations()
    # Text in and out is UTF-8 whatever the locale says.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return importlib.import_module(f"rung.cli.{name}").run(arguments[1:])


def _is_resumable(arguments: list[str]) -> bool:
    return len(arguments) > 1 and arguments[1] in RESUMABLE.get(arguments[0], ()) and "--report-only" not in arguments


def _terminated(number: int, frame: Any) -> None:
    """End as Ctrl-C does, so that nothing half made is left behind. Training has a way of its own, which saves."""
    raise KeyboardInterrupt("terminated")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rung COMMAND ...",
            "",
            "Train language models from scratch: from a text file to a tokenizer, a trained model and generated text.",
            "",
            *lines,
            "",
            "`rung COMMAND --help` says more of each.   Start with:",
            "",
            "  rung train my-novel.txt",
            '  rung generate runs/my-novel "Once upon a time"',
        ]
    )
