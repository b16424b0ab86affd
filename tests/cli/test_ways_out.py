"""What a command says of the way on or out: commands that can be pasted, the flags as they are typed, what is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import rung as package
from rung.run.prepare import CONFIG, ENVIRONMENT

LINE = "It was the best of times, it was the worst of times, and the rain fell in torrents all night.\n"


def refused(done, problem: str, hint: str) -> None:
    lines = done.err.splitlines()
    assert (done.status, len(lines)) == (2, 2), done.err
    assert problem in lines[0]
    assert hint in lines[1]


# Commands to go on with


def test_the_next_command_can_be_pasted(rung, bpe, here):
    (here / "a text.txt").write_text(LINE * 20)
    made = rung("corpus", "files", "a text.txt", "--out", "it's a corpus")
    assert shlex.split(made.text.splitlines()[-1]) == ["next:", "rung", "train", "it's a corpus"]
    built = rung("tokens", "build", "it's a corpus", "--tokenizer", bpe, "--out", "to kens")
    assert shlex.split(built.text.splitlines()[-1]) == ["next:", "rung", "train", "to kens"]
    (here / "a run").mkdir()
    for name in (CONFIG, ENVIRONMENT):
        (here / "a run" / name).touch()
    refused(rung("train", "a text.txt", "--run", "a run"), "a run exists already", "`rung resume 'a run'`")


def test_no_printed_command_names_a_place_unquoted():
    places = re.compile(r"\brung [a-z]+ (?:--?[a-z-]+ |[a-z.]+ )*\{(?!shlex)[^}]*(?:path|run|out|source|file)\b")
    for file in Path(package.__file__).parent.rglob("*.py"):
        found = places.search(file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found[0]}"
