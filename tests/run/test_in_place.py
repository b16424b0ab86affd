"""Training on files of ids where they lie: by name, imported, and as large as they get."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rung.config import Config, TokenizerConfig
from rung.errors import RungError
from rung.run.prepare import prepare
from rung.run.resuming import resume
from rung.run.store import import_tokens
from rung.run.use import evaluate
from rung.tokens.tokenizer import Tokenizer

FINEWEB = 10_248_871_837  # tokens of the published files


def quietly(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def byte_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("byte") / "byte.json"
    Tokenizer.train([], TokenizerConfig(kind="byte")).save(path)
    return path


def ids(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 257, n).astype(np.uint16)


def test_an_imported_store_trains_evaluates_and_resumes_like_one_that_was_built(train_tiny, byte_file, tmp_path):
    files = [tmp_path / "train.bin", tmp_path / "val.bin"]
    for seed, file in enumerate(files):
        ids(3000, seed).tofile(file)
    store = import_tokens([str(files[0])], byte_file, tmp_path / "store", validation=[str(files[1])], say=quietly)
    result = train_tiny(tmp_path / "run", sources=[store.path])
    assert evaluate(result["run"]).targets == 2999
    assert resume(result["run"], say=quietly)["steps"] == 12
    ids(3000, 2).tofile(files[0])
    with pytest.raises(RungError, match=r"train\.bin has changed"):
        resume(result["run"], say=quietly)


def test_a_bare_file_trains_as_the_same_file_imported(train_tiny, byte_file, tmp_path):
    np.save(tmp_path / "ids.npy", ids(3000))
    store = import_tokens([str(tmp_path / "ids.npy")], byte_file, tmp_path / "store", say=quietly)
    imported = train_tiny(tmp_path / "one", sources=[store.path])
    bare = train_tiny(tmp_path / "two", {"tokenizer.file": str(byte_file)}, sources=[tmp_path / "ids.npy"])
    assert (bare["validation_loss"], bare["train_loss"]) == (imported["validation_loss"], imported["train_loss"])


def test_what_nobody_looked_at_is_said(byte_file, tmp_path, monkeypatch):
    said: list[str] = []
    (ids(3000) % 256 + 1).astype(np.uint16).tofile(tmp_path / "one.bin")  # no end of text
    import_tokens([str(tmp_path / "one.bin")], byte_file, tmp_path / "one", say=said.append)
    assert said == ["no end of text was found in the tokens: they are taken for one document"]
    for name, value in (("files.WHOLE_BYTES", 100), ("in_place.LISTED_TOKENS", 100)):
        monkeypatch.setattr(f"rung.tokens.{name}", value)
    monkeypatch.setattr("rung.tokens.files.SAMPLE_BYTES", 200)
    ids(30_000).tofile(tmp_path / "two.bin")
    said.clear()
    steps = {"train.steps": 5, "train.batch_size": 2, "model.context_length": 16, "tokenizer.file": str(byte_file)}
    (tmp_path / "run").mkdir()
    prepared = prepare([str(tmp_path / "two.bin")], Config(), steps, tmp_path / "run", said.append)
    assert any("samples have been looked through" in line for line in said)
    assert any("documents that nobody has counted, about 2" in line for line in said)
    assert len(prepared.store.split("validation")) == pytest.approx(3000, rel=0.5)
    assert prepared.config.data.validation_fraction == 0.1


@pytest.mark.slow
def test_training_on_twenty_gigabytes_takes_the_memory_of_its_batches(byte_file, tmp_path):
    path = tmp_path / "fineweb.bin"
    try:
        with path.open("wb") as file:
            file.truncate(2 * FINEWEB)
        if path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("the file system has no sparse files")
    except OSError as error:
        pytest.skip(f"no sparse file of 20 GB here: {error}")
    program = (
        "import resource, sys\n"
        "import rung\n"
        "tiny = {'model.d_model': 16, 'model.n_layers': 1, 'model.n_heads': 2, 'model.context_length': 64,\n"
        "        'train.batch_size': 8, 'train.steps': 30, 'sample.max_tokens': 0, 'tokenizer.file': sys.argv[2],\n"
        "        'data.validation_fraction': 1e-7}\n"
        "rung.train(sys.argv[1], rung.Config(), tiny, run=sys.argv[3], say=lambda line: None)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    small = tmp_path / "small.bin"
    np.zeros(200_000, np.uint16).tofile(small)
    for number, file in enumerate((small, path)):
        words = [sys.executable, "-c", program, file, byte_file, tmp_path / f"run-{number}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 120, peaks  # MiB
