"""Engines: results in order, mistakes as they are, and a Ray cluster whose workers are killed in the middle."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.config import CleanConfig, DataConfig, TokenizerConfig
from rung.corpus import cleaning
from rung.corpus.documents import Document
from rung.corpus.workers import engine
from rung.corpus.writer import CorpusWriter
from rung.errors import RungError
from rung.tokens import encoding
from rung.tokens.engines import UnknownCharacter
from rung.tokens.store import build_store
from rung.tokens.tokenizer import Tokenizer


def square(number: int) -> int:
    if number == 13:
        raise RungError("thirteen", "take another")
    return number * number


@pytest.mark.medium
@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_tasks_are_asked_for_as_they_go(workers):
    asked = []

    def tasks():
        for number in range(50):
            asked.append(number)
            yield number + 100

    with engine("local", workers) as made:
        for place, result in enumerate(made.map(square, tasks())):
            assert result == (place + 100) ** 2
            assert len(asked) <= place + 1 + 2 * workers
        assert list(made.map(square, range(3))) == [0, 1, 4]  # again, with the same workers
        with pytest.raises(RungError, match="thirteen") as caught:
            list(made.map(square, range(20)))
        assert caught.value.hint == "take another"


def test_mistakes_go_between_processes_whole():
    for error in (
        RungError("a", "b"),
        UnknownCharacter("d", 3, "is odd", "see"),
        UnknownCharacter("d", 3, "x", "y", "n"),
    ):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert back.hint == error.hint
    assert str(pickle.loads(pickle.dumps(UnknownCharacter("d", 3, "is odd", "see"))).at(10, "file")) == str(
        UnknownCharacter("d", 13, "is odd", "see", "file")
    )


def test_an_interrupt_does_not_wait_for_what_was_begun():
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), engine("local", 2) as made:
        assert next(made.map(time.sleep, [0, 60, 60])) is None
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30


def test_without_ray_the_way_out_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RungError, match="ray is not installed") as caught, engine("ray"):
        pass
    assert "rung[ray]" in caught.value.hint


# A cluster of Ray's own, started by a program of its own, so that none of its threads and signals are ours.
PROGRAM = """
import sys
from pathlib import Path

import psutil
from rung.config import CleanConfig, DataConfig
from rung.corpus import cleaning
from rung.corpus.workers import engine
from rung.errors import RungError
from rung.tokens import encoding, writing
from rung.tokens.store import build_store
from rung.tokens.tokenizer import Tokenizer

cleaning._BLOCK_BYTES = 60_000
encoding._BATCH_CHARS = 20_000
writing._SAVE_TOKENS = 1 << 30
folder = Path(sys.argv[1])
killed = {"judge_block": 0, "_encode": 0}


def kill_a(task):
    def told(done, total):
        if killed[task] or not done:
            return
        for process in psutil.Process().children(recursive=True):
            try:
                at_work = process.cmdline()[:1]
            except psutil.Error:
                continue
            if at_work and at_work[0].startswith("ray::" + task):
                process.kill()
                killed[task] += 1
                return

    return told


def mistaken(number):
    raise RungError("a mistake", "of a task")


if __name__ == "__main__":
    with engine("ray", 2) as ray:
        from ray._common.usage import usage_lib

        print("telemetry", usage_lib.usage_stats_enabled())
        cleaning.clean(folder / "corpus", folder / "ray", CleanConfig(), ray, on_progress=kill_a("judge_block"))
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        build_store([folder / "corpus"], tokenizer, folder / "ray-store", DataConfig(), engine=ray,
                    on_progress=kill_a("_encode"))
        try:
            list(ray.map(mistaken, [1]))
        except RungError as error:
            print("mistake", error.problem, error.hint)
    print("killed", *killed.values())
"""


@pytest.mark.medium
def test_on_ray_with_a_worker_killed_in_the_middle_the_result_is_that_of_one_machine(tmp_path, monkeypatch):
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("PARITY"):
            pytest.fail("PARITY is set, but ray cannot be imported", pytrace=False)
        pytest.skip("ray is not installed; `make test PARITY=1` installs it")
    monkeypatch.setattr(cleaning, "_BLOCK_BYTES", 60_000)
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 20_000)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(3000)]
    with CorpusWriter(tmp_path / "corpus", "test") as writer:
        for number in range(500):
            writer.write(f"{number}", " ".join(rng.choices(words, k=rng.randint(20, 2000))))
        writer.write("copy", " ".join(words))
        writer.write("again", " ".join(words))
        writer.finish()
    tokenizer = Tokenizer.train([Document("words", iter([" ".join(words)]))], TokenizerConfig(vocab_size=600))
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "RAY_TMPDIR": str(short_folder(tmp_path))}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "telemetry False" in lines
    assert "mistake a mistake of a task" in lines
    assert "killed 1 1" in lines
    with engine("local", 1) as made:
        cleaning.clean(tmp_path / "corpus", tmp_path / "local", CleanConfig(), made)
    build_store(
        [tmp_path / "corpus"], Tokenizer.load(tmp_path / "tokenizer.json"), tmp_path / "local-store", DataConfig()
    )
    for kind in ("", "-store"):
        files = [{p.name: p.read_bytes() for p in (tmp_path / f"{name}{kind}").iterdir()} for name in ("ray", "local")]
        assert files[0] == files[1]


def short_folder(tmp_path: Path) -> Path:
    """Return a folder with a path short enough for sockets, which may have 107 characters."""
    folder = tmp_path.parent / "r"
    folder.mkdir(exist_ok=True)
    return folder
