"""Text to token ids and back, losslessly: byte-level BPE, characters, bytes, or a tokenizer file."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rung.config import TokenizerConfig
from rung.corpus.documents import PIECE_CHARS, Document, even_pieces
from rung.disk import whole_file
from rung.errors import RungError
from rung.tokens import engines
from rung.tokens.training import TrainingText, train_bpe

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"

# What other trainers call the end of a text, in the order in which we look for it.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_MIN_BPE = 257  # 256 bytes and the end of text

# Each once broke some tokenizer's round trip.
_PROBES = (
    "a",
    " a",
    "  two  spaces  ",
    "trailing ",
    "\ttab\n\n new",
    "CR\r\nLF\rCR",
    "\x00\x01\x1b\x7f\x85\xa0",
    "\ufeffmark",
    "line\u2028para\u2029",
    "caf\u00e9 cafe\u0301 \ufb01 \u00c5 \u212b",  # composed and not: normalisation would show
    "Straße STRASSE \u0130i",
    "\u2581a_\u2581\u2581b \u0120a\u010ab",  # what tokenizers write for spaces and line ends
    "国境の長いトンネル 雪　。",
    "สวัสดี مرحبا नमस्ते \u17d2\u094d\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1ef\U0001f1f5 \u2764\ufe0f",
    "\U00013000\U0010ffff\ue000\ufffd\ufffe",
    "don't I'll , . ! ?  it 's n't `` '' \u2018 \u2019 \u2026 -- \u2014",
    "<|endoftext|> <s></s> [UNK][SEP][CLS] <unk> <|im_start|>user <0x41> ##ing @@ </w>",
    "1234567890 3.14 \u0663\u0664",
    "".join(map(chr, range(1, 128))),
)


class Tokenizer:
    """A vocabulary and how text is spelled in it.

    ``kind``: "bpe", "char" and "byte" are ours, "file" is any other tokenizer.json. ``vocab_size``: ids are below it.
    ``end_id``: the id of the end of text (0 in ours). ``special_ids``: ids that stand for no text.
    ``token_bytes``: int32 [vocab_size], bytes of text that each id stands for; 0 for special tokens and unused ids.
    ``trained_on``: after ``train``, how much of the text the vocabulary was learned from; else None.
    Special tokens written in a text are ordinary characters of it.
    """

    def __init__(self, inner: tokenizers.Tokenizer, trained_on: TrainingText | None = None):
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self._spec: dict[str, Any] = json.loads(inner.to_str())
        self.trained_on = trained_on
        self.kind: Literal["bpe", "char", "byte", "file"] = engines.kind_of(self._spec)
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self.end_id: int = _end_id(vocabulary)
        silent = self.special_ids | {self.end_id}
        self._bytes: list[bytes] = engines.bytes_of_ids(inner, self._spec, self.vocab_size, silent)
        self.token_bytes: np.ndarray = np.fromiter(map(len, self._bytes), np.int32, self.vocab_size)
        self._engine = engines.engine_for(self.kind, inner, self._spec, self._bytes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the tokenizer.json in canonical form (sorted keys, no white space)."""
        canonical = json.dumps(self._spec, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of ``text``: int32 [n]. Text over 64 Ki characters is encoded piece by piece, as stores are.

        Raises:
            RungError: a character that the vocabulary cannot spell (character tokenizer without byte fallback), or half
                of a surrogate pair, which is no text.
        """
        if len(text) <= PIECE_CHARS:
            return self._engine(text)
        offset, parts = 0, []
        for piece in even_pieces(iter((text,))):
            try:
                parts.append(self._engine(piece))
            except engines.UnknownCharacter as error:
                raise error.at(offset) from None
            offset += len(piece)
        return np.concatenate(parts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, encoded in parallel."""
        if len(texts) < 2:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(self.encode, texts))

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """Return the bytes that ``ids`` stand for, in UTF-8; special tokens stand for none.

        Raises:
            RungError: an id outside the vocabulary.
        """
        return b"".join([self._bytes[i] for i in self._checked(ids)])

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of ``ids``. Only bytes that are no whole character come out as U+FFFD.

        Raises:
            RungError: an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def pieces(self, text: str) -> list[tuple[str, int]]:
        r"""Return the pieces of ``text`` with their ids; one that is not whole characters shows as ``\xe5\x9b``."""
        return [(self.show(i), i) for i in self.encode(text).tolist()]

    def show(self, token_id: int) -> str:
        """Return one id as a printable piece: its text, its bytes in hexadecimal, or a special token's name."""
        (token_id,) = self._checked([token_id])
        piece = self._bytes[token_id]
        if not piece:
            return self._inner.id_to_token(token_id) or ""
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in piece)

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, whole or not at all; the ``tokenizers`` library reads it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(self._inner.to_str(pretty=True).encode())

    def to_json(self) -> str:
        """Return what tokenizer.json holds, on one line."""
        return self._inner.to_str()

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """Return the tokenizer of ``to_json``."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str(text))

    @classmethod
    def load(cls, path: str | Path, allow_lossy: bool = False) -> Tokenizer:
        """Read a tokenizer.json, or GPT-2's vocabulary and merges: a folder that holds them, or one of its files.

        Raises:
            RungError: no such file, not a tokenizer, no end-of-text token, or texts that do not come back (the line
                shows one) unless ``allow_lossy``.
        """
        tokenizer = cls(_read(Path(path)))
        if tokenizer.kind == "file" and not allow_lossy and (lost := tokenizer.first_lost()):
            raise RungError(
                f"tokenizer {path} is lossy: {lost[0]!r} comes back as {lost[1]!r}",
                "take one that gives every text back, or accept it with --tokenizer.allow-lossy",
            )
        return tokenizer

    def first_lost(self) -> tuple[str, str] | None:
        """Return the first of a battery of awkward texts that does not survive a round trip, and what comes back."""
        for text in _PROBES:
            try:
                back = self.decode(self.encode(text))
            except (RungError, ValueError) as error:
                back = str(error).split("\n")[0]
            if back != text:
                return text, back
        return None

    @classmethod
    def train(cls, documents: Iterable[Document], config: TokenizerConfig) -> Tokenizer:
        """Learn a tokenizer from documents, in bounded memory; the documents are read once.

        A text may have fewer merges than ``config.vocab_size`` asks for: compare ``vocab_size`` of the result.

        Raises:
            RungError: a vocabulary too small for byte-level BPE, or no text at all.
        """
        if config.kind == "byte":
            return cls(engines.byte_tokenizer(END))
        pieces = (piece for document in documents for piece in document.pieces)
        if config.kind == "char":
            alphabet: set[str] = set()
            for piece in pieces:
                alphabet.update(piece)
            if not alphabet:
                raise RungError("no text to learn an alphabet from", "name a file that has text in it")
            return cls(engines.char_tokenizer(END, sorted(alphabet), config.byte_fallback))
        if config.vocab_size < _MIN_BPE:
            raise RungError(
                f"tokenizer.vocab_size {config.vocab_size} is too small for byte-level BPE",
                f"it takes {_MIN_BPE} for the 256 bytes and {END}; or take --tokenizer.kind byte",
            )
        inner, trained_on = train_bpe(pieces, END, config.vocab_size, config.min_frequency, config.training_memory)
        return cls(inner, trained_on)

    def _checked(self, ids: Iterable[int] | np.ndarray) -> list[int]:
        ids_N = np.asarray(ids if isinstance(ids, np.ndarray | list | tuple) else list(ids), np.int64).reshape(-1)
        wrong = (ids_N < 0) | (ids_N >= self.vocab_size)
        if wrong.any():
            raise RungError(
                f"token id {ids_N[wrong][0]} is not in the vocabulary of {self.vocab_size}",
                "these ids were made by another tokenizer",
            )
        return ids_N.tolist()


class StreamDecoder:
    """Decodes ids as they come; only whole characters come out, and all of them together equal ``decode(all ids)``."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text that is certain after these ids."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


# Helpers


def _end_id(vocabulary: dict[str, int]) -> int:
    for name in _ENDS:
        if name in vocabulary:
            return vocabulary[name]
    raise RungError(f"the tokenizer has no {END}", f"documents need an end: it must have one of {', '.join(_ENDS)}")


def _read(path: Path) -> tokenizers.Tokenizer:
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _read_json(path / "tokenizer.json")
        for pair in _GPT2_FILES:
            if all((path / name).is_file() for name in pair):
                return _read_gpt2(*(path / name for name in pair))
        hint = "it should hold tokenizer.json, or encoder.json and vocab.bpe"
        raise RungError(f"no tokenizer in folder {path}", hint)
    if not path.is_file():
        hint = "name a tokenizer.json, or a folder with encoder.json and vocab.bpe"
        raise RungError(f"no tokenizer file {path}", hint)
    for pair in _GPT2_FILES:
        if path.name in pair:
            files = [path.with_name(name) for name in pair]
            missing = [file for file in files if not file.is_file()]
            if missing:
                raise RungError(f"{path} needs {missing[0].name} beside it", "GPT-2's tokenizer is two files")
            return _read_gpt2(*files)
    return _read_json(path)


def _read_json(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RungError(f"{path} cannot be read: {error.strerror}", "look at its permissions") from None
    except Exception as error:  # the library raises bare Exception, whatever is wrong with the file
        reason = str(error).split("\n")[0]
        hint = "it should be a file that the tokenizers library wrote"
        raise RungError(f"{path} is not a tokenizer.json: {reason}", hint) from None


def _read_gpt2(vocabulary: Path, merges: Path) -> tokenizers.Tokenizer:
    try:
        ids = json.loads(vocabulary.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
        rules = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        pairs = [(left, right) for left, right in rules]
        return engines.byte_level_bpe(ids, pairs, END if END in ids else None)
    except (ValueError, AttributeError, OSError) as error:
        reason = str(error).split("\n")[0]
        problem = f"{vocabulary} and {merges.name} are not GPT-2's files: {reason}"
        raise RungError(problem, "a vocabulary is JSON of token to id; merges are lines of two tokens") from None
