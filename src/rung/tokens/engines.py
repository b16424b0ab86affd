"""What is inside a tokenizer: its model by kind, the bytes of each id, and the fastest exact way to encode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rung.errors import RungError

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["bpe", "char", "byte", "file"]
Engine = Callable[[str], np.ndarray]

# How GPT-2 cuts text into words before BPE (its encoder.py; \p{L} letters, \p{N} numbers).
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class UnknownCharacter(RungError):
    """A character that a tokenizer cannot spell, at an offset in characters (of the document ``name``, where known)."""

    def __init__(self, character: str, offset: int, problem: str, hint: str, name: str = ""):
        where = f"{name}: " if name else ""
        super().__init__(f"{where}character {character!r} (U+{ord(character):04X}) at offset {offset} {problem}", hint)
        self._made_of = (character, offset, problem, hint)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownCharacter, self._made_of

    def at(self, offset: int, name: str = "") -> UnknownCharacter:
        """Return the same error with ``offset`` characters before the text it was found in."""
        character, within, problem, hint = self._made_of
        return UnknownCharacter(character, offset + within, problem, hint, name)


# Models by kind


def byte_level_bpe(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], end: str | None
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer as GPT-2's, with ``end`` as a special token."""
    import tokenizers
    from tokenizers import decoders, models

    inner = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))
    inner.pre_tokenizer = byte_level()
    inner.decoder = decoders.ByteLevel()
    if end is not None:
        inner.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return inner


def byte_level(use_regex: bool = True) -> Any:
    """Return the pre-tokenizer that spells bytes as visible characters, after GPT-2's pattern where asked."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def byte_tokenizer(end: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of one token a byte: ``end`` is 0, byte b is b + 1."""
    vocabulary = {end: 0, **{character: byte + 1 for character, byte in _byte_of_character().items()}}
    inner = byte_level_bpe(vocabulary, [], end)
    inner.pre_tokenizer = byte_level(use_regex=False)
    return inner


def char_tokenizer(end: str, alphabet: Sequence[str], byte_fallback: bool) -> tokenizers.Tokenizer:
    """Return the tokenizer of one token a character: ``end`` is 0, then the alphabet, then (by choice) 256 bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {end: 0, **{character: number for number, character in enumerate(alphabet, start=1)}}
    if byte_fallback:
        vocabulary |= {f"<0x{byte:02X}>": len(alphabet) + 1 + byte for byte in range(256)}
        inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        # A word-level model without an unknown token refuses a strange character; BPE would drop it.
        inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=""))
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(?m:.)"), "isolated")
        inner.decoder = decoders.Fuse()
    inner.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return inner


def kind_of(spec: dict[str, Any]) -> Kind:
    """Return the kind of a parsed tokenizer.json: ours by its parts, else "file"."""
    model, pre = spec["model"], spec["pre_tokenizer"]
    added = {token["content"] for token in spec["added_tokens"]}
    vocabulary = model.get("vocab")
    plain = [token for token in vocabulary if token not in added] if isinstance(vocabulary, dict) else []
    if spec["normalizer"] or spec["post_processor"] or not plain:
        return "file"
    if model["type"] == "WordLevel" and model["unk_token"] == "" and all(len(token) == 1 for token in plain):
        return "char"
    if model["type"] != "BPE":
        return "file"
    if not model["merges"] and not pre and model["byte_fallback"]:
        spelled = {f"<0x{byte:02X}>" for byte in range(256)}
        return "char" if spelled == {token for token in plain if len(token) > 1} else "file"
    if pre and pre["type"] == "ByteLevel" and not pre["add_prefix_space"] and _plain_bpe(model):
        complete = set(_byte_of_character()) <= set(plain)
        if complete and not pre["use_regex"]:
            return "byte" if not model["merges"] and len(plain) == 256 else "file"
        return "bpe" if complete else "file"
    return "file"


# Bytes of each id


def bytes_of_ids(
    inner: tokenizers.Tokenizer, spec: dict[str, Any], vocab_size: int, special: frozenset[int]
) -> list[bytes]:
    """Return the UTF-8 bytes that each id stands for; none for special tokens and for ids without a token."""
    kind = kind_of(spec)
    added = inner.get_added_tokens_decoder()
    if kind == "char":
        spell = _fallback_bytes
    elif (spec["decoder"] or {}).get("type") == "ByteLevel":
        spell = _visible_bytes
    else:
        return _marginal_bytes(inner, vocab_size, special)
    table = [b""] * vocab_size
    for token, i in inner.get_vocab(with_added_tokens=True).items():
        if i not in special:
            table[i] = token.encode() if i in added else spell(token)
    return table


def _marginal_bytes(inner: tokenizers.Tokenizer, vocab_size: int, special: frozenset[int]) -> list[bytes]:
    """Return what the tokenizer's own decoder adds to a text for each id: exact for no decoder that looks further."""
    table = [b""] * vocab_size
    for i in inner.get_vocab(with_added_tokens=True).values():
        token = inner.id_to_token(i)
        if i in special or token is None:
            continue
        if (byte := _fallback_bytes(token)) != token.encode():
            table[i] = byte
            continue
        once, twice = inner.decode([i]), inner.decode([i, i])
        table[i] = (twice[len(once) :] if twice.startswith(once) else once).encode()
    return table


def _fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.encode()


def _visible_bytes(token: str) -> bytes:
    byte_of = _byte_of_character()
    # A token with other characters was never made of bytes; it stands for itself, as the library decodes it.
    return bytes([byte_of[c] for c in token]) if all(c in byte_of for c in token) else token.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's bijection from visible characters to bytes: printable Latin-1 is itself, the rest from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


# Encoding


def engine_for(kind: Kind, inner: tokenizers.Tokenizer, spec: dict[str, Any], table: list[bytes]) -> Engine:
    """Return the fastest function from text to int32 ids that gives exactly the tokenizer's ids."""
    if kind == "byte":
        return lambda text: np.frombuffer(_utf8(text), np.uint8).astype(np.int32) + 1
    if kind == "char":
        return _char_engine(spec)
    return (_tiktoken_engine(inner, spec, table) if kind == "bpe" else None) or _library_engine(inner)


def _library_engine(inner: tokenizers.Tokenizer) -> Engine:
    def encode(text: str) -> np.ndarray:
        _utf8(text)
        return np.array(inner.encode(text, add_special_tokens=False).ids, np.int32)

    return encode


def _char_engine(spec: dict[str, Any]) -> Engine:
    vocabulary = {token: i for token, i in spec["model"]["vocab"].items() if len(token) == 1}
    first_byte = spec["model"]["vocab"].get("<0x00>")
    id_of_code = np.full(0x110000 if vocabulary and max(vocabulary) > "\uffff" else 0x10000, -1, np.int32)
    for character, i in vocabulary.items():
        id_of_code[ord(character)] = i

    def encode(text: str) -> np.ndarray:
        _utf8(text)
        codes_N = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids_N = id_of_code[np.minimum(codes_N, len(id_of_code) - 1)]
        ids_N[codes_N >= len(id_of_code)] = -1
        unknown = np.flatnonzero(ids_N < 0)
        if not unknown.size:
            return ids_N
        if first_byte is None:
            where = int(unknown[0])
            raise UnknownCharacter(
                text[where], where, "is not in the tokenizer's alphabet", "train it with --tokenizer.byte-fallback true"
            )
        spelled = [text[where].encode() for where in unknown.tolist()]
        parts, begin = [], 0
        for where, octets in zip(unknown.tolist(), spelled, strict=True):
            parts += [ids_N[begin:where], np.frombuffer(octets, np.uint8).astype(np.int32) + first_byte]
            begin = where + 1
        return np.concatenate([*parts, ids_N[begin:]])

    return encode


def _tiktoken_engine(inner: tokenizers.Tokenizer, spec: dict[str, Any], table: list[bytes]) -> Engine | None:
    """Return tiktoken with the same merges, which is 2-3 times faster, or None where its ids could differ.

    The library merges the pairs that are listed, tiktoken any pair whose joined bytes are a token. The two agree on
    every text when (1) each token is made by one merge only, of parts made before it, and (2) the bytes of each token
    alone encode to that token: then a pair that joins to a token is always the listed one. Both are checked here, and
    a battery of awkward texts besides, as the two libraries match the pattern by engines of their own.
    """
    import tiktoken

    vocabulary: dict[str, int] = spec["model"]["vocab"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in spec["model"]["merges"]]
    base = _byte_of_character()
    rank = {character: n for n, character in enumerate(sorted(base, key=vocabulary.__getitem__))}
    for left, right in merges:
        joined = left + right
        if left not in rank or right not in rank or joined in rank or inner.model.tokenize(joined)[0].value != joined:
            return None
        rank[joined] = len(rank)
    id_of_rank = np.array([vocabulary[token] for token in rank], np.int32)
    ranks = {table[vocabulary[token]]: n for token, n in rank.items()}
    core = tiktoken.Encoding("rung", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
    slow = _library_engine(inner)

    def encode(text: str) -> np.ndarray:
        try:
            return id_of_rank[core.encode_to_numpy(text, disallowed_special=())]
        except UnicodeEncodeError:
            _utf8(text)
            raise
        except ValueError:  # its pattern engine gives up on some long runs of white space
            return slow(text)

    return encode if all(np.array_equal(encode(text), slow(text)) for text in _AWKWARD) else None


_AWKWARD = (
    "I'll they've we're I'm he's it'd don't 'S 'LL'll ''s",
    "  a  b \n\n c\t\td \r\n\r\n e  ",
    "\u00a0a\u3000b\u2028c\u0085d\u200be",
    "x1y22z333 \u00bd\u00b2\u2167 \u0663\u0967",
    "\u00e9e\u0301 \u00c5 \ufb01 \U0001f600\u200d\U0001f1ef\U0001f1f5",
    "国境の長いトンネルを抜けると",
    "<|endoftext|>",
    "!!!??? ...--- \u2014\u2026",
    "\x00\x01\x1f\x7f",
    "a" * 300,
    " " * 300 + "a",
    "\n" * 300,
    "ab" * 200 + " " + "ba" * 200,
)


# Helpers


def _plain_bpe(model: dict[str, Any]) -> bool:
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return not any(model.get(name) for name in odd)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem, hint = "is half of a surrogate pair, which is no text", "decode the source properly first"
        raise UnknownCharacter(text[error.start], error.start, problem, hint) from None
