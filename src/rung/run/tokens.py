"""Tokens that were made before: a token store, or a bare file of ids whose end is held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rung.errors import RungError
from rung.tokens.files import is_token_file
from rung.tokens.in_place import lay_out, open_splits
from rung.tokens.mixture import MixedStore, Store, parts
from rung.tokens.store import DATASET, TOKENIZER, TokenStore
from rung.tokens.tokenizer import Tokenizer


def is_tokens(source: str | Path) -> bool:
    """Return whether ``source`` names a token store or a file of ids, rather than text."""
    path = Path(source)
    return (path / DATASET).exists() or is_token_file(path)


def open_tokens(path: Path, tokenizer: Tokenizer, validation_fraction: float | None) -> TokenStore:
    """Open a token store; or a bare file of ids, used where it lies, its last part the validation split.

    Args:
        path: of the folder or file.
        tokenizer: that the tokens of a bare file were made with.
        validation_fraction: of a bare file that is held out; cut between two documents where two meet near there.
            ``None``: a tenth, of large files less.

    Raises:
        RungError: nothing there, a damaged file, too few tokens, an id that is not in the vocabulary.
    """
    if not path.is_file():
        return TokenStore.open(path)
    info = lay_out([path], tokenizer, fraction=validation_fraction)
    return TokenStore(path, info, open_splits(path.parent, info))


def tokenizer_of(path: Path, named: str | Path = "", allow_lossy: bool = False) -> Tokenizer:
    """Return the tokenizer that made the tokens at ``path``: a store's own, or for a bare file the one ``named``.

    Raises:
        RungError: a bare file and none named; one that did not make the store's tokens; as ``Tokenizer.load``.
    """
    own = path / TOKENIZER
    if not named and path.is_file():
        raise RungError(f"{path} holds token ids, and no tokenizer is named", "name theirs: --tokenizer FILE")
    tokenizer = Tokenizer.load(named or own, allow_lossy=allow_lossy)
    made_with = None if path.is_file() else TokenStore.open(path).tokenizer_hash
    if made_with not in (None, tokenizer.hash):
        raise RungError(
            f"{named or own} is not the tokenizer of the tokens in {path}",
            f"leave --tokenizer out: theirs is {own}" if named else "build the tokens again",
        )
    return tokenizer


def open_store(
    paths: Sequence[Path], tokenizer: Tokenizer, validation_fraction: float | None, weights: Sequence[float]
) -> Store:
    """Open one store as ``open_tokens``, or several as a mixture with ``weights``.

    Raises:
        RungError: as ``open_tokens`` and ``MixedStore``; a bare file among several.
    """
    for path in paths:
        if path.is_file() and len(paths) > 1:
            raise RungError(
                f"{path} is a file of ids, and a mixture is of token stores",
                "make it one, which copies nothing: rung tokens import",
            )
    stores = [open_tokens(path, tokenizer, validation_fraction) for path in paths]
    return stores[0] if len(stores) == 1 else MixedStore(stores, weights)


def say_of_in_place(store: Store, say: Callable[[str], None]) -> None:
    """Say what is known of tokens that are used where they lie, and what nobody has looked for."""
    splits = [part.tokens for name in store.splits for part in parts(store, name)]
    if any(split.estimated for split in splits):
        say(
            "used in place: samples have been looked through, and each id is looked at when it is read; "
            "`rung tokens import --verify` looks at all, and counts documents and bytes"
        )
    if store.info["splits"]["train"]["documents_by"] == "none":
        say("no end of text was found in the tokens: they are taken for one document")
