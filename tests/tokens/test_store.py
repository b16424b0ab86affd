"""The token store: what goes in comes out, whole or not at all, and a change of the text is noticed."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rung.config import DataConfig, TokenizerConfig
from rung.corpus.documents import Document, Scan, documents, even_pieces
from rung.corpus.sources import resolve
from rung.errors import RungError
from rung.tokens import store as store_module
from rung.tokens import writing
from rung.tokens.split import hold_out
from rung.tokens.store import Tokens, TokenStore, build_store
from rung.tokens.tokenizer import Tokenizer

SEPARATED = DataConfig(separator="<|endoftext|>")


def train(text: str, **config) -> Tokenizer:
    return Tokenizer.train([Document("text", even_pieces(iter([text])))], TokenizerConfig(**config))


@pytest.fixture(scope="module")
def tokenizer():
    return train("The long tunnel, the snow. 国境の長いトンネルを抜けると雪国であった。\n" * 30, vocab_size=350)


@pytest.fixture
def novels(tmp_path):
    """Forty documents of different lengths in one file."""
    texts = [f"Novel {k}: 雪 " + "the snow \r\n" * (k * 7 % 40 + 1) for k in range(40)]
    path = tmp_path / "novels.txt"
    path.write_bytes("<|endoftext|>".join(texts).encode())
    return path, texts


def documents_of(store: TokenStore, tokenizer: Tokenizer, split: str) -> list[str]:
    """Return the texts of a split, cut at its document starts."""
    tokens = store.split(split)
    ids = tokens.read(0, len(tokens))
    parts = np.split(ids, tokens.document_starts[1:])
    for part in parts:
        assert part[-1] == tokenizer.end_id
        assert tokenizer.end_id not in part[:-1]
    return [tokenizer.decode(part) for part in parts]


@pytest.mark.parametrize("shard_tokens", [97, 1000, 1 << 20])
def test_every_document_is_in_one_split_whole_whatever_the_shards(tmp_path, novels, tokenizer, shard_tokens):
    path, texts = novels
    store = build_store([path], tokenizer, tmp_path / "store", SEPARATED, shard_tokens=shard_tokens)
    train_texts, held_out = (documents_of(store, tokenizer, split) for split in ("train", "validation"))
    assert sorted(train_texts + held_out) == sorted(texts)
    assert train_texts == [text for text in texts if text in set(train_texts)]  # in order
    share = sum(len(text.encode()) for text in held_out) / sum(len(text.encode()) for text in texts)
    assert 0.1 <= share <= 0.15
    assert store.split("train").text_bytes == sum(len(text.encode()) for text in train_texts)
    assert store.split("train").names == [f"novels.txt#{texts.index(text) + 1}" for text in train_texts]


def test_other_libraries_read_the_shards(tmp_path, novels, tokenizer):
    build_store([novels[0]], tokenizer, tmp_path / "store", SEPARATED, shard_tokens=101)
    store = TokenStore.open(tmp_path / "store")
    info = json.loads((tmp_path / "store/dataset.json").read_text(encoding="utf-8"))
    count = info["splits"]["train"]["shards"]
    assert count > 2
    tokens, starts = [], []
    for k in range(count):
        with safe_open(tmp_path / f"store/train-{k:05d}-of-{count:05d}.safetensors", "numpy") as file:
            tokens.append(file.get_tensor("tokens"))
            starts.append(file.get_tensor("document_starts"))
            # A shard lists the documents that begin in it.
            assert all(k * 101 <= start < (k + 1) * 101 for start in starts[-1])
    assert {part.dtype for part in tokens} == {np.dtype(np.uint16)}
    assert {len(part) for part in tokens[:-1]} == {101}
    train_split = store.split("train")
    assert np.array_equal(np.concatenate(tokens), train_split.read(0, len(train_split)))
    assert np.array_equal(np.concatenate(starts), train_split.document_starts)
    assert sorted(path.name for path in (tmp_path / "store").iterdir() if "safetensors" not in path.name) == [
        "dataset.json",
        "tokenizer.json",
    ]
    assert Tokenizer.load(tmp_path / "store").hash == store.tokenizer_hash == tokenizer.hash


def test_the_store_does_not_depend_on_the_number_of_workers(tmp_path, novels, tokenizer):
    for workers in (1, 2, 5):
        build_store([novels[0]], tokenizer, tmp_path / f"{workers}", SEPARATED, workers=workers, shard_tokens=500)
    files = [{p.name: p.read_bytes() for p in (tmp_path / f"{workers}").iterdir()} for workers in (1, 2, 5)]
    assert files[0] == files[1] == files[2]


def test_one_document_is_cut_at_the_character_first_part_trains(tmp_path, shared_data):
    path = shared_data / "tinyshakespeare.txt"
    text = path.read_text(encoding="utf-8")
    tokenizer = train(text, kind="char", byte_fallback=False)
    store = build_store([path], tokenizer, tmp_path / "store", DataConfig())
    ids = {name: store.split(name).read(0, len(store.split(name))) for name in store.splits}
    cut = int(len(text) * 0.9)
    assert tokenizer.decode(ids["train"]) == text[:cut]
    assert tokenizer.decode(ids["validation"]) == text[cut:]
    assert (len(ids["train"]), len(ids["validation"])) == (1_003_854, 111_540)  # the usual numbers of this text


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=60), st.floats(0.01, 0.5))
def test_documents_held_out_come_near_the_fraction_and_are_never_all(sizes, fraction):
    scan = Scan()
    scan.bytes.extend(sizes)
    scan.chars.extend(sizes)
    chosen = hold_out(scan, fraction).documents
    assert 1 <= len(chosen) < len(sizes)
    assert chosen == hold_out(scan, fraction).documents
    held = sum(sizes[number] for number in chosen)
    assert held <= 1.5 * fraction * sum(sizes) or (len(chosen) == 1 and held == min(sizes))
    left = [size for number, size in enumerate(sizes) if number not in chosen]
    # Whatever could still be taken would go over 1.5 times the fraction, unless the fraction is reached.
    assert held >= fraction * sum(sizes) or held + min(left) > 1.5 * fraction * sum(sizes)


def test_named_validation_text_wins_over_the_fraction(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("train on this")
    (tmp_path / "v.txt").write_text("hold this out")
    data = DataConfig(validation=(str(tmp_path / "v.txt"),))
    store = build_store([tmp_path / "a.txt"], tokenizer, tmp_path / "store", data)
    assert documents_of(store, tokenizer, "train") == ["train on this"]
    assert documents_of(store, tokenizer, "validation") == ["hold this out"]
    with pytest.raises(RungError, match="both training and validation"):
        build_store([tmp_path], tokenizer, tmp_path / "other", data)


def test_nothing_is_held_out_when_the_fraction_is_0(tmp_path, novels, tokenizer):
    data = DataConfig(separator="<|endoftext|>", validation_fraction=0)
    store = build_store([novels[0]], tokenizer, tmp_path / "store", data)
    assert documents_of(store, tokenizer, "train") == novels[1]
    with pytest.raises(RungError, match="has no validation split"):
        store.split("validation")


def test_empty_documents_are_left_out_counted_and_said(tmp_path, tokenizer):
    (tmp_path / "t.txt").write_text("one<|endoftext|><|endoftext|>two<|endoftext|>three")
    (tmp_path / "u.txt").touch()
    store = build_store([tmp_path], tokenizer, tmp_path / "store", SEPARATED)
    assert store.empty_documents == 2
    assert "2 empty documents left out" in store.describe()
    assert sum(len(store.split(name).document_starts) for name in store.splits) == 3


def test_text_that_is_too_short_says_what_is_too_small(tmp_path, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text("The snow. ")
    with pytest.raises(RungError, match=r"validation split is too small: 1 characters make 1 tokens, and it takes 2"):
        build_store([path], tokenizer, tmp_path / "store", DataConfig())
    path.write_text("a")
    with pytest.raises(RungError, match="train split is too small: 0 characters make 0 tokens"):
        build_store([path], tokenizer, tmp_path / "store", DataConfig())
    path.write_text("The long tunnel, the snow." * 8)  # 208 bytes are enough
    assert len(build_store([path], tokenizer, tmp_path / "store", DataConfig()).split("validation")) >= 2


def test_a_vocabulary_over_65535_is_uint32_and_recorded(tmp_path, tokenizer):
    class Large(Tokenizer):
        """Ids far apart: what a large vocabulary gives, without training one."""

        def encode(self, text):
            return super().encode(text) * 220

    large = Large(tokenizer._inner)
    large.vocab_size = 80_000
    path = tmp_path / "t.txt"
    path.write_text("The long tunnel, the snow. 国境の長い" * 20)
    store = build_store([path], large, tmp_path / "store", DataConfig())
    assert store.info["dtype"] == "uint32"
    tokens = store.split("train")
    assert tokens.read(0, len(tokens)).max() > 65_535
    assert tokenizer.decode(tokens.read(0, len(tokens)) // 220) == path.read_text()[: int(len(path.read_text()) * 0.9)]
    tokenizer.vocab_size, kept = 65_536, tokenizer.vocab_size
    assert build_store([path], tokenizer, tmp_path / "fits", DataConfig()).info["dtype"] == "uint16"
    tokenizer.vocab_size = kept


def test_offsets_over_4_gb_are_right(tmp_path):
    path, count = tmp_path / "large.safetensors", 3_000_000_000
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    marks = {0: 1, 2_147_483_647: 2, 2_147_483_650: 3, 2_500_000_000: 4, count - 1: 5}
    with path.open("wb") as file:  # sparse: 6 GB that take a few blocks
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * count)
        for position, value in marks.items():
            file.seek(8 + len(header) + 2 * position)
            file.write(struct.pack("<H", value))
    tokens = TokenStore.open(path).split("train")
    assert len(tokens) == count
    starts = np.array(list(marks)) - 1
    assert tokens.gather(starts, 3)[:, 1].tolist() == [1, 2, 3, 4, 5]
    assert tokens.read(2_500_000_000, 2_500_000_002).tolist() == [4, 0]


def test_a_bare_file_takes_its_documents_from_the_end_of_text(tmp_path, tokenizer):
    from safetensors.numpy import save_file

    path = tmp_path / "bare.safetensors"
    save_file({"tokens": np.array([5, 6, 0, 7, 0, 8, 9, 0], np.uint16)}, path)
    assert TokenStore.open(path).split("train").document_starts.tolist() == [0]
    assert TokenStore.open(path, tokenizer).split("train").document_starts.tolist() == [0, 3, 5]
    save_file({"weights": np.zeros(3)}, path)
    with pytest.raises(RungError, match="has no tensor named tokens"):
        TokenStore.open(path)
    save_file({"tokens": np.zeros((3, 2), np.uint16)}, path)
    with pytest.raises(RungError, match="not one row"):
        TokenStore.open(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RungError, match="not a safetensors file"):
        TokenStore.open(path)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("No space left on device"), RungError("a", "b")])
def test_a_build_that_is_interrupted_leaves_nothing(tmp_path, novels, tokenizer, monkeypatch, failure):
    calls, write = [], writing.ShardWriter.write

    def interrupted(self, tokens):
        calls.append(1)
        if len(calls) == 20:
            raise failure
        write(self, tokens)

    monkeypatch.setattr(writing.ShardWriter, "write", interrupted)
    out = tmp_path / "stores/store"
    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else RungError):
        build_store([novels[0]], tokenizer, out, SEPARATED)
    assert list(out.parent.iterdir()) == []


@pytest.fixture
def keeps_often(monkeypatch):
    monkeypatch.setattr(writing, "_SAVE_TOKENS", 150)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("No space left on device")])
@pytest.mark.parametrize("data", [SEPARATED, DataConfig()])
@pytest.mark.parametrize("after", [12, 25, 39, 52])
def test_an_interrupted_build_goes_on_and_ends_the_same(
    tmp_path, novels, tokenizer, monkeypatch, keeps_often, failure, data, after
):
    if not data.separator:  # one document, in pieces short enough to be many
        pieces = {"PIECE_CHARS": 100}
        monkeypatch.setattr("rung.corpus.documents.even_pieces.__defaults__", (pieces["PIECE_CHARS"],))
    build_store([novels[0]], tokenizer, tmp_path / "whole", data, shard_tokens=211)
    write, encode = writing.ShardWriter.write, Tokenizer.encode
    calls, encoded = [], []

    def interrupted(self, tokens):
        calls.append(1)
        if len(calls) == after:
            raise failure
        write(self, tokens)

    monkeypatch.setattr(writing.ShardWriter, "write", interrupted)
    out = tmp_path / "stores/store"
    with pytest.raises(KeyboardInterrupt if failure is KeyboardInterrupt else RungError):
        build_store([novels[0]], tokenizer, out, data, shard_tokens=211)
    assert [path.name for path in out.parent.iterdir()] == [".store.partial"]
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    monkeypatch.setattr(store_module, "scan", None)  # it was kept
    build_store([novels[0]], tokenizer, out, data, shard_tokens=211)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    text = novels[0].read_bytes().decode().replace("<|endoftext|>", "" if data.separator else "<|endoftext|>")
    assert 0 < len("".join(encoded)) < len(text)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("change", ["text", "tokenizer", "settings", "shards"])
def test_what_was_begun_from_anything_else_is_not_gone_on_from(
    tmp_path, novels, tokenizer, monkeypatch, keeps_often, change
):
    path, _ = novels
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_store([path], tokenizer, tmp_path / "store", SEPARATED, shard_tokens=211)
    assert (tmp_path / ".store.partial").is_dir()
    data, shard_tokens = SEPARATED, 211
    if change == "text":
        path.write_bytes(path.read_bytes().replace(b"Novel 3", b"Novel X"))
    elif change == "tokenizer":
        tokenizer = train("something else altogether", vocab_size=260)
    elif change == "settings":
        data = DataConfig(separator="<|endoftext|>", validation_fraction=0.2)
    else:
        shard_tokens = 300
    build_store([path], tokenizer, tmp_path / "store", data, shard_tokens=shard_tokens)
    build_store([path], tokenizer, tmp_path / "fresh", data, shard_tokens=shard_tokens)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "fresh")


def test_a_build_cut_short_while_its_shards_got_their_names_goes_on(
    tmp_path, novels, tokenizer, monkeypatch, keeps_often
):
    build_store([novels[0]], tokenizer, tmp_path / "whole", SEPARATED, shard_tokens=211)
    with monkeypatch.context() as patch:
        patch.setattr(writing._SplitWriter, "finish", renames_two)
        with pytest.raises(KeyboardInterrupt):
            build_store([novels[0]], tokenizer, tmp_path / "store", SEPARATED, shard_tokens=211)
    assert len(list((tmp_path / ".store.partial").glob("*-of-*"))) == 2
    build_store([novels[0]], tokenizer, tmp_path / "store", SEPARATED, shard_tokens=211)
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")


def renames_two(writer):
    writer._close()
    for k, path in enumerate(writer.paths[:2]):
        path.rename(path.with_name(writing.shard_name("train", k, 9)))
    raise KeyboardInterrupt


BUILD = """
import sys
from rung.config import DataConfig
from rung.tokens import writing
from rung.tokens.store import build_store
from rung.tokens.tokenizer import Tokenizer
writing._SAVE_TOKENS = 20_000
build_store([sys.argv[1]], Tokenizer.load(sys.argv[2]), sys.argv[3], DataConfig(separator="<|endoftext|>"),
            workers=int(sys.argv[4]), shard_tokens=70_001)
"""


@pytest.mark.medium
def test_killed_again_and_again_a_build_ends_the_same_with_any_number_of_workers(tmp_path, tokenizer):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh 雪国", k=6)) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=rng.randrange(50, 1500))) for _ in range(400)]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "build.py").write_text(BUILD)

    def start(out: str, workers: int) -> subprocess.Popen:
        names = ["build.py", "text.txt", "tokenizer.json", out]
        return subprocess.Popen([sys.executable, *(str(tmp_path / name) for name in names), str(workers)])

    assert start("whole", 1).wait() == 0
    progress = tmp_path / ".store.partial/progress.npz"
    stamp = 0
    for workers in (1, 2, 3):
        process = start("store", workers)
        while process.poll() is None and (not progress.exists() or progress.stat().st_mtime_ns <= stamp):
            time.sleep(0.001)
        assert process.poll() is None, "it was done before it could be killed"
        process.kill()
        process.wait()
        stamp = progress.stat().st_mtime_ns
    assert start("store", 2).wait() == 0
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")
    assert len(files_of(tmp_path / "store")) > 5


@pytest.mark.medium
def test_the_store_of_an_engine_is_that_of_threads(tmp_path, novels, tokenizer, monkeypatch):
    from rung.corpus.workers import engine
    from rung.tokens import encoding

    monkeypatch.setattr(encoding, "_BATCH_CHARS", 500)
    build_store([novels[0]], tokenizer, tmp_path / "threads", SEPARATED)
    for workers in (1, 2):
        with engine("local", workers) as made:
            build_store([novels[0]], tokenizer, tmp_path / f"{workers}", SEPARATED, engine=made)
        assert files_of(tmp_path / f"{workers}") == files_of(tmp_path / "threads")


def test_an_engine_says_where_a_character_is_that_cannot_be_spelled(tmp_path):
    from rung.corpus.workers import engine

    tokenizer = train("abc ", kind="char", byte_fallback=False)
    (tmp_path / "text.txt").write_text("abc " * 50_000 + "abcd")
    with engine("local", 1) as made, pytest.raises(RungError, match=r"text.txt: character 'd' .* at offset 200003"):
        build_store([tmp_path / "text.txt"], tokenizer, tmp_path / "store", DataConfig(), engine=made)
    assert not list(tmp_path.glob(".*"))


def test_a_store_is_replaced_only_when_asked_and_only_when_the_new_one_is_whole(
    tmp_path, novels, tokenizer, monkeypatch
):
    out = tmp_path / "stores/store"
    build_store([novels[0]], tokenizer, out, SEPARATED)
    with pytest.raises(RungError, match="exists") as caught:
        build_store([novels[0]], tokenizer, out, DataConfig())
    assert "--overwrite" in caught.value.hint
    monkeypatch.setattr(store_module, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_store([novels[0]], tokenizer, out, DataConfig(), overwrite=True)
    assert len(TokenStore.open(out).split("train").document_starts) > 10
    monkeypatch.undo()
    build_store([novels[0]], tokenizer, out, DataConfig(), overwrite=True)
    assert len(TokenStore.open(out).split("train").document_starts) == 1
    (out / "mine").mkdir()
    with pytest.raises(RungError, match="store/mine is not Rung's, and would be removed with"):
        build_store([novels[0]], tokenizer, out, DataConfig(), overwrite=True)
    assert (out / "mine").is_dir()
    assert [path.name for path in out.parent.iterdir()] == ["store"]


def test_changed_text_settings_and_tokenizer_are_noticed(tmp_path, novels, tokenizer):
    path, _ = novels
    store = build_store([path], tokenizer, tmp_path / "store", SEPARATED)
    assert store.differences([path], tokenizer, SEPARATED) == []
    other = train("other text " * 30, vocab_size=300)
    assert [line.split(":")[0] for line in store.differences([path], other, DataConfig(validation_fraction=0.2))] == [
        "tokenizer",
        "data.separator",
        "data.validation_fraction",
    ]
    data = path.read_bytes()
    path.write_bytes(b"M" + data[1:])
    assert store.differences([path]) == ["novels.txt: its content has changed"]
    path.write_bytes(data + b"!")
    assert store.differences([path]) == [f"novels.txt: {len(data) + 1} bytes now, {len(data)} in the store"]
    path.rename(tmp_path / "renamed.txt")
    assert len(store.differences([tmp_path / "renamed.txt"])) == 2
    changed = build_store([tmp_path / "renamed.txt"], tokenizer, tmp_path / "changed", SEPARATED)
    assert changed.identity != store.identity
    assert TokenStore.open(tmp_path / "store").identity == store.identity


def test_a_store_that_does_not_match_its_dataset_file_is_refused(tmp_path, novels, tokenizer):
    out = tmp_path / "store"
    with pytest.raises(RungError, match="no token store at"):
        TokenStore.open(out)
    build_store([novels[0]], tokenizer, out, SEPARATED, shard_tokens=500)
    shard = sorted(out.glob("train-*"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(RungError, match="not a safetensors file"):
        TokenStore.open(out)
    shard.write_bytes(sorted(out.glob("train-*"))[-1].read_bytes())
    with pytest.raises(RungError, match=r"dataset\.json says"):
        TokenStore.open(out)
    shard.unlink()
    with pytest.raises(RungError, match="no file"):
        TokenStore.open(out)
    info = json.loads((out / "dataset.json").read_text())
    (out / "dataset.json").write_text(json.dumps({**info, "version": 99}))
    with pytest.raises(RungError, match="version 99"):
        TokenStore.open(out)


def test_a_character_that_the_tokenizer_cannot_spell_is_named_with_its_document(tmp_path):
    tokenizer = train("abc ", kind="char", byte_fallback=False)
    path = tmp_path / "t.txt"
    path.write_text("abc " * 50_000 + "é" + "abc")
    with pytest.raises(RungError, match=r"t\.txt: character 'é' \(U\+00E9\) at offset 200000"):
        build_store([path], tokenizer, tmp_path / "store", DataConfig())


def test_shift_jis_novels_in_a_folder_come_back(tmp_path, shared_data, tokenizer):
    texts = []
    with tarfile.open(shared_data / "aozora/aozora-raw-4-authors.tar.xz") as archive:
        for member in archive:
            if member.name.endswith(".txt") and len(texts) < 5:
                data = archive.extractfile(member).read()
                (tmp_path / "in").mkdir(exist_ok=True)
                (tmp_path / "in" / Path(member.name).name).write_bytes(data)
                texts.append(data.decode("cp932"))
    data = DataConfig(encoding="cp932")
    store = build_store([tmp_path / "in"], tokenizer, tmp_path / "store", data)
    found = documents_of(store, tokenizer, "train") + documents_of(store, tokenizer, "validation")
    assert sorted(found) == sorted(texts)


def test_progress_reaches_the_whole_of_the_text(tmp_path, novels, tokenizer):
    told = []
    build_store([novels[0]], tokenizer, tmp_path / "s", SEPARATED, on_progress=lambda *done: told.append(done))
    size = novels[0].stat().st_size
    assert told[-1] == (size, size)


def test_building_holds_little_memory(tmp_path, tokenizer):
    import tracemalloc

    path = tmp_path / "long.txt"
    path.write_text("the long tunnel and the snow " * 400_000)  # 12 MB
    tracemalloc.start()
    build_store([path], tokenizer, tmp_path / "store", DataConfig())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def tokens_in_shards(sizes):
    values = np.arange(1, sum(sizes) + 1, dtype=np.uint16)
    return Tokens(np.split(values, np.cumsum(sizes)[:-1]), np.zeros(1, np.int64)), values


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 40),
    st.lists(st.integers(-60, 300), max_size=20),
)
def test_gather_is_slices_of_the_whole_and_0_outside(sizes, length, starts):
    tokens, values = tokens_in_shards(sizes)
    padded = np.concatenate([np.zeros(100), values, np.zeros(400)])
    expected = [padded[100 + start : 100 + start + length] for start in starts]
    rows = tokens.gather(np.array(starts, np.int64), length)
    assert rows.shape == (len(starts), length)
    assert rows.dtype == np.int32
    assert all(np.array_equal(row, one) for row, one in zip(rows, expected, strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_read_crosses_shards(sizes, data):
    tokens, values = tokens_in_shards(sizes)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    assert np.array_equal(tokens.read(start, stop), values[start:stop])


def test_gathering_a_batch_takes_well_under_a_millisecond(tmp_path):
    path = tmp_path / "tokens.safetensors"
    from safetensors.numpy import save_file

    save_file({"tokens": np.random.default_rng(0).integers(0, 50_000, 10_000_000).astype(np.uint16)}, path)
    tokens = TokenStore.open(path).split("train")
    starts = np.random.default_rng(1).integers(0, len(tokens) - 129, 256)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        tokens.gather(starts, 129)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5e-3


def test_the_tokens_room_does_not_import_jax():
    import subprocess

    script = "import sys, rung.tokens.batches, rung.tokens.store; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_documents_that_are_counted_are_the_ones_that_are_encoded(novels):
    found = list(documents(resolve([novels[0]]), SEPARATED))
    assert len(found) == 40
