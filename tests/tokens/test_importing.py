"""Tokens used where they lie: the same ids as in the files, nothing loaded, nothing that changes unnoticed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rung.config import TokenizerConfig
from rung.errors import RungError
from rung.run.tokens import open_tokens
from rung.tokens import importing, in_place
from rung.tokens.batches import IGNORED, Batches, validation_batches
from rung.tokens.files import blocks
from rung.tokens.importing import import_store
from rung.tokens.store import Tokens, TokenStore
from rung.tokens.tokenizer import Tokenizer

FINEWEB = 10_248_871_837  # tokens of the published files
END = 0


@pytest.fixture(scope="module")
def byte() -> Tokenizer:
    return Tokenizer.train([], TokenizerConfig(kind="byte"))


def stream(n: int, documents: int, seed: int = 0) -> np.ndarray:
    """Return ids of documents, an end of text after each."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 257, n).astype(np.uint16)
    ids[rng.choice(n - 1, documents - 1, replace=False)] = END
    ids[-1] = END
    return ids


def written(folder: Path, *parts: np.ndarray) -> list[Path]:
    """Write each part in another format."""
    paths = []
    for k, part in enumerate(parts):
        path = folder / f"part-{k}{('.bin', '.npy', '.safetensors')[k % 3]}"
        if path.suffix == ".bin":
            part.tofile(path)
        elif path.suffix == ".npy":
            np.save(path, part.astype(np.int64))
        else:
            save_file({"tokens": part}, path)
        paths.append(path)
    return paths


def read(store: TokenStore, name: str) -> np.ndarray:
    return store.split(name).read(0, len(store.split(name)))


def test_files_are_one_stream_in_order_whose_end_is_held_out(tmp_path, byte):
    ids = stream(9000, 40)
    files = written(tmp_path, *np.split(ids, [2000, 2001, 8500]))
    store = import_store(files, byte, tmp_path / "store", validation_fraction=0.25)
    train, validation = read(store, "train"), read(store, "validation")
    np.testing.assert_array_equal(np.concatenate([train, validation]), ids)
    assert train[-1] == END  # the cut is between two documents
    assert abs(len(validation) - 2250) <= 1125
    starts = [0, *(np.flatnonzero(train == END) + 1)[:-1]]
    assert store.split("train").document_starts.tolist() == starts
    assert store.split("train").text_bytes == (train != END).sum()
    assert store.tokenizer_hash == byte.hash == Tokenizer.load(tmp_path / "store").hash
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["dataset.json", "tokenizer.json"]
    assert sum(path.stat().st_size for path in (tmp_path / "store").iterdir()) < 100_000


def test_dataset_json_is_enough_for_another_program(tmp_path, byte):
    ids = stream(5000, 20)
    import_store(written(tmp_path, *np.split(ids, [1200, 3000])), byte, tmp_path / "store")
    info = json.loads((tmp_path / "store/dataset.json").read_text(encoding="utf-8"))
    found = [
        np.fromfile(tmp_path / "store" / piece["path"], piece["dtype"], piece["tokens"], offset=piece["offset"])
        for name in ("train", "validation")
        for piece in info["files"][name]
    ]
    np.testing.assert_array_equal(np.concatenate(found), ids)


def test_named_files_are_held_out(tmp_path, byte):
    train, held_out = written(tmp_path, stream(500, 3), stream(300, 3, seed=1))
    store = import_store([train], byte, tmp_path / "store", validation=[held_out])
    assert (len(store.split("train")), len(store.split("validation"))) == (500, 300)
    with pytest.raises(RungError, match="named twice"):
        import_store([train], byte, tmp_path / "other", validation=[train])
    assert not (tmp_path / "other").exists()


def test_the_default_holds_no_more_out_than_a_person_wants_to_wait_for(tmp_path, byte, monkeypatch):
    monkeypatch.setattr(in_place, "MOST_HELD_OUT", 50)
    store = import_store(written(tmp_path, np.full(1000, 9, np.uint16)), byte, tmp_path / "store")
    assert len(store.split("validation")) == 50
    monkeypatch.undo()
    assert in_place.MOST_HELD_OUT == 10_485_760


# Documents told apart without a list of them


def large(tmp_path: Path, ids: np.ndarray, monkeypatch, **rest) -> TokenStore:
    """Import ids as if they were too many to be looked through."""
    for name, value in (("files.WHOLE_BYTES", 100), ("files.SAMPLE_BYTES", 40), ("in_place.LISTED_TOKENS", 100)):
        monkeypatch.setattr(f"rung.tokens.{name}", value)
    byte = Tokenizer.train([], TokenizerConfig(kind="byte"))
    return import_store(written(tmp_path, ids), byte, tmp_path / "store", overwrite=True, **rest)


@pytest.mark.parametrize("windows", ["contiguous", "random"])
def test_the_ends_in_a_row_tell_documents_apart_as_their_list_does(tmp_path, monkeypatch, windows):
    ids = stream(5000, 300)
    store = large(tmp_path, ids, monkeypatch, validation_fraction=0.0)
    told = store.split("train")
    assert told.ends_tell
    assert not len(told.document_starts)
    listed = Tokens([ids], np.concatenate([[0], np.flatnonzero(ids[:-1] == END) + 1]), end_id=END)
    settings = {"context_length": 32, "batch_size": 8, "seed": 3, "windows": windows, "segments": True}
    for step in range(50):  # over two epochs, with rows that stick out at both ends
        one, two = Batches(told, **settings)(step), Batches(listed, **settings)(step)
        np.testing.assert_array_equal(one["tokens"], two["tokens"])
        np.testing.assert_array_equal(one["targets"], two["targets"])
        for mine, theirs, targets in zip(one["segments"], two["segments"], one["targets"], strict=True):
            counts = targets != IGNORED  # elsewhere it makes no difference
            same = mine[counts][:, None] == mine[counts]
            np.testing.assert_array_equal(same, theirs[counts][:, None] == theirs[counts])
    assert Batches(told, **settings).documents(0) == []
    (batch, *_) = validation_batches(told, context_length=32, batch_size=8, segments=True)
    np.testing.assert_array_equal(batch["segments"][0], np.cumsum(ids[:32] == END))


def test_verifying_counts_what_samples_estimate(tmp_path, monkeypatch):
    ids = stream(5000, 300)
    store = large(tmp_path, ids, monkeypatch)
    split = store.split("train")
    assert (split.n_documents, split.estimated) == (None, True)
    assert split.text_bytes == pytest.approx((ids[: len(split)] != END).sum(), rel=0.1)
    verified = large(tmp_path, ids, monkeypatch, verify=True).split("train")
    assert verified.n_documents == (ids[: len(split)] == END).sum()
    assert (verified.text_bytes, verified.estimated) == ((ids[: len(split)] != END).sum(), False)
    assert TokenStore.open(tmp_path / "store").identity == store.identity


def test_an_id_that_samples_missed_is_refused_by_verify_and_where_it_is_read(tmp_path, monkeypatch):
    ids = stream(5000, 300)
    ids[[1070, 1071]] = 999
    with pytest.raises(RungError, match=r"part-0\.bin: token 1,070 has the token id 999, .* is 257"):
        large(tmp_path, ids, monkeypatch, verify=True)
    assert not (tmp_path / "store").exists()
    split = large(tmp_path, ids, monkeypatch).split("train")
    split.read(0, 1070)
    for call in (lambda: split.read(1000, 1100), lambda: split.gather(np.array([0, 1071]), 5)):
        with pytest.raises(RungError, match=r"part-0\.bin: token 1,07[01] has the token id 999"):
            call()


def test_a_position_is_that_in_the_file_also_in_the_second_split_of_the_second_file(tmp_path, monkeypatch):
    files = written(tmp_path, np.full(3000, 5, np.uint16), np.full(3000, 5, np.uint16))
    array = np.load(files[1])
    array[2995] = 2**32 + 5
    np.save(files[1], array)
    for name, value in (("files.WHOLE_BYTES", 100), ("files.SAMPLE_BYTES", 16), ("files.SAMPLE_BLOCKS", 2)):
        monkeypatch.setattr(f"rung.tokens.{name}", value)
    byte = Tokenizer.train([], TokenizerConfig(kind="byte"))
    store = import_store(files, byte, tmp_path / "store", validation_fraction=0.1)
    with pytest.raises(RungError, match=r"part-1\.npy: token 2,995 has the token id 4294967301"):
        store.split("validation").read(0, 600)


# What changes


def test_a_file_that_changed_is_refused_and_one_that_moved_along_is_not(tmp_path, byte):
    (tmp_path / "here").mkdir()
    files = written(tmp_path / "here", stream(500, 3))
    identity = import_store(files, byte, tmp_path / "here/store").identity
    os.utime(files[0], ns=(1, 1))  # as after a copy
    assert TokenStore.open(tmp_path / "here/store").identity == identity
    (tmp_path / "here").rename(tmp_path / "there")
    assert TokenStore.open(tmp_path / "there/store").identity == identity
    moved = tmp_path / "there/part-0.bin"
    data = bytearray(moved.read_bytes())
    data[40] ^= 1
    moved.write_bytes(data)
    with pytest.raises(RungError, match="has changed since"):
        TokenStore.open(tmp_path / "there/store")
    moved.write_bytes(data[:-2])
    with pytest.raises(RungError, match="has changed since"):
        TokenStore.open(tmp_path / "there/store")
    moved.unlink()
    with pytest.raises(RungError, match="no such file") as gone:
        TokenStore.open(tmp_path / "there/store")
    assert "put the file back" in gone.value.hint


def test_a_store_elsewhere_than_its_files_finds_them_from_wherever_it_is(tmp_path, byte):
    (tmp_path / "data").mkdir()
    (tmp_path / "work").mkdir()
    import_store(written(tmp_path / "data", stream(500, 3)), byte, tmp_path / "work/store")
    (tmp_path / "work").rename(tmp_path / "play")
    assert len(TokenStore.open(tmp_path / "play/store").split("train")) > 400


def test_something_at_the_place_is_not_overwritten_unasked(tmp_path, byte):
    files = written(tmp_path, stream(500, 3))
    import_store(files, byte, tmp_path / "store")
    with pytest.raises(RungError, match="store exists"):
        import_store(files, byte, tmp_path / "store")
    import_store(files, byte, tmp_path / "store", overwrite=True)


# As large as they get


def sparse(path: Path) -> Path:
    """Make a file of 20 GB of ids that takes no room, or skip."""
    header = b""
    if path.suffix == ".safetensors":
        text = json.dumps({"tokens": {"dtype": "U16", "shape": [FINEWEB], "data_offsets": [0, 2 * FINEWEB]}}).encode()
        header = struct.pack("<Q", len(text)) + text
    elif path.suffix == ".npy":
        text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({FINEWEB},)}}\n".encode()
        header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + 2 * FINEWEB)
        if path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("the file system has no sparse files")
    except OSError as error:
        pytest.skip(f"no sparse file of 20 GB here: {error}")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".bin"])
def test_opening_twenty_gigabytes_takes_no_time_and_no_memory(tmp_path, byte, suffix):
    path = sparse(tmp_path / f"fineweb{suffix}")
    import_store([path], byte, tmp_path / "store")
    program = (
        "import sys, time, psutil, numpy as np\n"
        "from pathlib import Path\n"
        "from rung.run.tokens import open_tokens\n"
        "from rung.tokens.batches import Batches\n"
        "from rung.tokens.store import TokenStore\n"
        "from rung.tokens.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.load(sys.argv[1]); tokenizer.token_bytes\n"
        "memory = psutil.Process().memory_info\n"
        "bare = lambda: open_tokens(Path(sys.argv[2]), tokenizer, None)\n"
        "for opened in (lambda: TokenStore.open(sys.argv[1]), bare):\n"
        "    before, took = memory().rss, []\n"
        "    for _ in range(5):\n"
        "        begun = time.perf_counter(); store = opened(); took.append(time.perf_counter() - begun)\n"
        "    print(min(took), memory().rss - before)\n"
        "split = store.split('train')\n"
        "made = Batches(split, context_length=1024, batch_size=64, seed=0, windows='contiguous', segments=True)\n"
        "before = memory().rss\n"
        "most = 0\n"
        "for step in range(250):\n"
        "    made(step)\n"
        "    most = max(most, memory().rss - before)\n"
        "print(len(split), most)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store", path], capture_output=True, text=True, check=True
    )
    store, bare, batches = ([float(word) for word in line.split()] for line in done.stdout.splitlines())
    assert store[0] < 0.1
    assert store[1] < 4 << 20
    assert bare[0] < 0.1
    assert bare[1] < 16 << 20
    assert batches[0] == FINEWEB - 10_485_760
    assert batches[1] < 128 << 20  # of a gigabyte that the system maps for 16,000 rows


def test_importing_reads_only_samples(tmp_path, byte):
    path = sparse(tmp_path / "fineweb.bin")
    with path.open("r+b") as file:
        file.seek(FINEWEB + 10_000_001)  # somewhere in the middle, and in no sample
        file.write(struct.pack("<H", 60_000))
    begun = time.perf_counter()
    import_store([path], byte, tmp_path / "store")
    assert time.perf_counter() - begun < 30


def listed(path: Path, ids: np.ndarray, starts: list[int]) -> Path:
    save_file({"tokens": ids, "document_starts": np.array(starts, np.int64)}, path)
    return path


@pytest.mark.parametrize(
    ("starts", "why"),
    [
        ([0, 9, 4], "document start 2 is at token 4, which does not come after the one before"),
        ([0, 4, 4], "document start 2 is at token 4, which does not come after the one before"),
        ([-3, 4], "document start 0 is at token -3, and there are 30 tokens"),
        ([0, 30], "document start 1 is at token 30, and there are 30 tokens"),
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_documents_that_begin_nowhere_are_refused_with_the_first_of_them(tmp_path, byte, starts, why, verify):
    file = listed(tmp_path / "ids.safetensors", stream(30, 3), starts)
    with pytest.raises(RungError, match=why):
        import_store([file], byte, tmp_path / "store", verify=verify)
    assert not (tmp_path / "store").exists()
    with pytest.raises(RungError, match=why):
        TokenStore.open(file, byte)
    with pytest.raises(RungError, match=why):
        open_tokens(file, byte, None)  # as training does


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_verifying_looks_at_the_end_of_text_before_each_listed_document(tmp_path, byte, fraction, monkeypatch):
    monkeypatch.setattr(importing, "blocks", lambda *given: blocks(*given, block_tokens=7))
    ids = stream(300, 12)
    starts = [0, *(np.flatnonzero(ids == END)[:-1] + 1).tolist()]
    right = listed(tmp_path / "right.safetensors", ids, starts)
    store = import_store([right], byte, tmp_path / "right", validation_fraction=fraction, verify=True)
    assert sum(store.split(name).n_documents for name in store.splits) == len(starts)
    for number in range(1, len(starts)):
        wrong = [*starts[:number], starts[number] + 1, *starts[number + 1 :]]
        if len(set(wrong)) < len(wrong) or ids[wrong[number] - 1] == END:
            continue
        file = listed(tmp_path / "wrong.safetensors", ids, wrong)
        with pytest.raises(RungError, match=f"start {number} is at token {wrong[number]}, .* end of text, {END}"):
            import_store([file], byte, tmp_path / "wrong", validation_fraction=fraction, verify=True)
        import_store([file], byte, tmp_path / f"unseen-{number}", validation_fraction=fraction)


def test_each_split_tells_documents_apart_in_its_own_way(tmp_path, byte):
    ids = stream(60, 4)
    starts = [0, *(np.flatnonzero(ids == END)[:-1] + 1).tolist()]
    with_list = listed(tmp_path / "list.safetensors", ids, starts)
    (plain,) = written(tmp_path, ids)
    for train, held_out in ((with_list, plain), (plain, with_list)):
        store = import_store([train], byte, tmp_path / train.stem, validation=[held_out])
        for name in ("train", "validation"):
            assert store.split(name).document_starts.tolist() == starts
