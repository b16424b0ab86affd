"""Tokenizing: ``rung tokens build`` against a plain ``tokenizers.encode_batch`` loop, and the memory of ours.

English (six novels of Jane Austen, which ship with Rung) and Japanese (works of Aozora Bunko beside the project), with
a byte-level BPE of 16,384 entries learned from each. The two sides take turns, each a program of its own on the same
cores. Ours does all that a build does: it reads the file, counts it, splits it, encodes and writes; the plain loop has
its text in memory, and keeps nothing. Memory is the highest resident size of the program that builds, as the system
counts it.

    .venv/bin/python benchmarks/tokenizing.py

It prints tables and writes ``benchmarks/results/tokenizing.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ARCHIVE = HERE.parent / "../shared/data/aozora/aozora-raw-4-authors.tar.xz"
RESULTS = HERE / "results" / "tokenizing.json"
VOCABULARY = 16_384
SIDES = ("plain", "ours")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Tokenizing against tokenizers.encode_batch, in turns.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--megabytes", type=int, default=12, help="of text in a turn")
    parser.add_argument("--memory", type=int, nargs="*", default=[50, 500], help="sizes for memory, in MB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rung-bench-") as name:
        folder = Path(name)
        summary = {
            "speed": {
                language: _speed(folder, language, text, args.rounds, args.megabytes)
                for language, text in (("English", _austen()), ("Japanese", _aozora()))
            },
            "memory": _memory(folder, args.memory),
            "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
            "versions": {name: version(name) for name in ("tokenizers", "tiktoken", "numpy")},
            "date": time.strftime("%Y-%m-%d"),
        }
    RESULTS.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(_tables(summary))


def _speed(folder: Path, language: str, text: str, rounds: int, megabytes: int) -> dict[str, Any]:
    path, tokenizer = folder / f"{language}.txt", folder / f"{language}.json"
    _write(path, text, megabytes)
    _train(path, tokenizer)
    size = path.stat().st_size / 1e6
    rates: dict[str, list[float]] = {f"{side}, {n}": [] for side in SIDES for n in (1, 2)}
    processor = {name: list[float]() for name in rates}
    tokens: dict[str, int] = {}
    loads = []
    for number in range(rounds):
        for cores in (2, 1):
            for side in SIDES:
                said = _run(side, cores, path, tokenizer, folder / "store")
                rates[f"{side}, {cores}"].append(size / said["seconds"])
                processor[f"{side}, {cores}"].append(size / said["processor_seconds"])
                tokens[side] = said["tokens"]
        loads.append(os.getloadavg()[0])
        shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        print(f"{language} {number + 1}/{rounds}, MB/s: {shown}  load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    ratios = {
        f"{cores}": [a / b for a, b in zip(rates[f"ours, {cores}"], rates[f"plain, {cores}"], strict=True)]
        for cores in (1, 2)
    }
    return {
        "megabytes": size,
        "megabytes_per_second": {name: _spread(values) for name, values in rates.items()},
        "megabytes_per_processor_second": {name: _spread(values) for name, values in processor.items()},
        "ours_over_plain": {cores: _spread(values) for cores, values in ratios.items()},
        "two_cores_over_one": _spread([b / a for a, b in zip(rates["ours, 1"], rates["ours, 2"], strict=True)]),
        "tokens": tokens,
        "load": {"median": statistics.median(loads), "highest": max(loads)},
    }


def _memory(folder: Path, sizes: list[int]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for language, text in (("English", _austen()), ("Japanese", _aozora())):
        path = folder / "memory.txt"
        found[language] = {}
        for megabytes in sizes:
            _write(path, text, megabytes)
            said = _run("ours", 2, path, folder / f"{language}.json", folder / "store")
            found[language][f"{megabytes}"] = round(said["peak_bytes"] / 1e6)
            print(f"{language}, {megabytes} MB: {said['peak_bytes'] / 1e6:.0f} MB at most", file=sys.stderr, flush=True)
        path.unlink(missing_ok=True)
    return found


def _run(side: str, cores: int, path: Path, tokenizer: Path, store: Path) -> dict[str, Any]:
    command = [sys.executable, __file__.replace("tokenizing.py", "tokenize_once.py"), side, str(cores)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [*command, str(path), str(tokenizer), str(store)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _train(path: Path, out: Path) -> None:
    from rung.config import DataConfig, TokenizerConfig
    from rung.corpus.documents import documents
    from rung.corpus.sources import resolve
    from rung.tokens.tokenizer import Tokenizer

    Tokenizer.train(documents(resolve([path]), DataConfig()), TokenizerConfig(vocab_size=VOCABULARY)).save(out)


def _write(path: Path, text: str, megabytes: int) -> None:
    """Write so much of a text, over and over."""
    data = text.encode()
    with path.open("wb") as file:
        left = megabytes * 1_000_000
        while left > 0:
            part = data[:left].decode("utf-8", "ignore").encode()
            if not part:
                break
            left -= file.write(part)


def _austen() -> str:
    novels = sorted((HERE.parent / "src/rung/demo/austen").glob("*.txt"))
    return "".join(novel.read_text(encoding="utf-8") for novel in novels)


def _aozora() -> str:
    """Return raw works as they are published; markup is text as good as any here."""
    texts = []
    with tarfile.open(ARCHIVE) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.endswith(".txt") and (work := archive.extractfile(member)):
                texts.append(work.read())
    return "".join(text.decode("cp932", "replace") for text in texts)


def _spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def _tables(summary: dict[str, Any]) -> str:
    lines = ["| text | cores | plain, MB/s | ours, MB/s | ours / plain |", "|---|---:|---:|---:|---:|"]
    for language, said in summary["speed"].items():
        for cores in ("1", "2"):
            rates = [said["megabytes_per_second"][f"{side}, {cores}"]["median"] for side in SIDES]
            ratio = said["ours_over_plain"][cores]
            lines.append(
                f"| {language} | {cores} | {rates[0]:.2f} | {rates[1]:.2f} | "
                f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f}) |"
            )
    for language, said in summary["memory"].items():
        shown = ", ".join(f"{peak:.0f} MB for {size} MB" for size, peak in said.items())
        lines.append(f"\nmemory, {language}: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
