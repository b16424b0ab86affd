"""The documentation: its commands parse, its links lead somewhere, its tables are what the code says.

``docs/configuration.md`` is made from ``rung.config``; run this file (``python tests/test_docs.py``) to write it anew.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from rung import config as settings
from rung.cli import COMMANDS
from rung.cli.flags import SHORT_NAMES, Parser, given_settings
from rung.cli.training_flags import base_of, changes_of
from rung.config import Config, GenerateConfig
from rung.errors import RungError
from rung.model import Decoder
from rung.model.decoder import with_vocabulary
from rung.model.weights import parameter_count

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "docs/configuration.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CHARACTERS = 66  # of Shakespeare's works, and the end of text: what a character preset's count is given for

OPENING = """\
# Configuration

Every setting of Rung, with its default. This page is made from `src/rung/config.py`, which is where a setting is
declared, once, with its type, bounds and help; `python tests/test_docs.py` writes it anew.

A setting is named by its path: `model.d_model` in a config file and in Python, `--model.d-model` as a flag. A run
starts from a preset or a file (`--preset`, `--config`), flags change it, and what came of it is in `config.toml` in the
run folder, which `--config` reads. A default of 0 that stands for another value says so. A list is a flag given several
times: `--sample.prompts One --sample.prompts Two`."""


# docs/configuration.md


def reference() -> str:
    """Return the page of every setting, as ``rung.config`` declares them."""
    lines = [OPENING]
    for prefix, cls in [*sections(Config), ("generate", GenerateConfig)]:
        lines += ["", f"## {prefix or 'The run'}", "", *_opening(prefix, cls), *_table(prefix, cls)]
    return "\n".join(lines) + "\n"


def sections(cls: type) -> Iterator[tuple[str, type]]:
    yield "", cls
    for name, kind in typing.get_type_hints(cls).items():
        if hasattr(kind, "__dataclass_fields__"):
            yield name, kind


def _opening(prefix: str, cls: type) -> list[str]:
    if cls is Config:
        return []
    said = [(cls.__doc__ or "").strip()]
    if prefix == "generate":
        said[0] += " Flags of `rung generate`, without a prefix: `--top-k 40`."
    return [*said, ""]


def _table(prefix: str, cls: type) -> list[str]:
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    shorts = {path: short for short, path in SHORT_NAMES.items()}
    for name, declared in settings.fields(cls):
        if cls is Config and "." in name:
            continue
        path = name if cls in (Config, GenerateConfig) else f"{prefix}.{name}"
        known = declared.metadata["setting"]
        meaning = known.help + (f" (short: `--{shorts[path]}`)" if path in shorts else "")
        values = _values(settings.field_type(cls, name), known)
        lines.append(f"| `{path}` | {_default(declared.default)} | {values} | {meaning} |")
    return lines


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" if one else "the empty text" for one in value) or "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "empty"


def _values(kind: Any, known: settings.Setting) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of: {_values(typing.get_args(kind)[0], known)}"
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    said = known.unit or {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}[kind]
    if known.low > -float("inf"):
        said += f", {'over' if known.open_low else 'from'} {known.low:,g}"
    if known.high < float("inf"):
        said += f", {'below' if known.open_high else 'to'} {known.high:,.10g}"
    return said


def test_the_page_of_settings_is_what_the_config_declares():
    assert CONFIGURATION.read_text(encoding="utf-8") == reference(), "run `python tests/test_docs.py`"


# Commands


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield (page, text) of every block of code in a language."""
    for page in PAGES:
        for text in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            yield page.name, text


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of every command in a ``sh`` block, up to a pipe, a redirection or a comment."""
    for page, text in blocks("sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s[|]\s|\s&&\s", line):
                words = shlex.split(part, comments=True)
                if words and words[0] in ("rung", "make"):
                    end = next((n for n, word in enumerate(words) if word in ("<", ">")), len(words))
                    yield page, words[:end]


class Parsed(Exception):
    """The command's words were understood; nothing more is done."""


@pytest.mark.parametrize(("page", "words"), list(commands()), ids=lambda value: str(value)[:60])
def test_a_command_in_the_documentation_parses(page, words, monkeypatch):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
        return
    parse = Parser.parse_args

    def parse_only(self, arguments=None, namespace=None):
        raise Parsed(parse(self, arguments, namespace))

    monkeypatch.setattr(Parser, "parse_args", parse_only)
    if words[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(f"rung.cli.{words[1]}").run(words[2:])
    elif len(words) > 1 and words[1] in COMMANDS:
        with pytest.raises(Parsed) as parsed:
            importlib.import_module(f"rung.cli.{words[1]}").run(words[2:])
        flags = parsed.value.args[0]
        if "train.steps" in flags and "preset" in flags:
            base = settings.Config() if flags.config else base_of(flags)
            settings.resolve(settings.adapt(base or settings.preset("demo"), changes_of(flags))[0])
        elif "top_k" in flags:
            settings.checked(GenerateConfig(**given_settings(flags, GenerateConfig)))
    else:
        pytest.fail(f"{' '.join(words)} is no command")


def test_the_documentation_has_commands_and_the_test_sees_a_wrong_flag(monkeypatch):
    assert len(list(commands())) > 30
    with pytest.raises(RungError, match="unknown flag --stepz"):
        importlib.import_module("rung.cli.train").run(["novel.txt", "--stepz", "3"])


def test_every_command_is_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"rung {name}" not in text] == []


@pytest.mark.parametrize(("page", "text"), list(blocks("python")))
def test_python_in_the_documentation_names_what_there_is(page, text):
    import rung

    for node in ast.walk(ast.parse(text, page)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rung":
            assert node.attr in rung.__all__
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rung."):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


# Links and tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_table_of_presets_has_them_all_with_their_parameter_counts():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \|", text, re.M)
    told = {name: int(count.replace(",", "")) for name, count in rows}
    counted = {}
    for name in settings.preset_names():
        config = settings.resolve(settings.preset(name))
        vocabulary = CHARACTERS if config.tokenizer.kind == "char" else config.tokenizer.vocab_size
        counted[name] = parameter_count(Decoder(with_vocabulary(config.model, vocabulary)).weights())
    assert told == counted


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


if __name__ == "__main__":
    CONFIGURATION.write_text(reference(), encoding="utf-8")
