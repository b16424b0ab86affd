"""From sources to a token store and a config in which nothing is left open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rung import config as settings
from rung.config import Config
from rung.corpus import sources as corpus_sources
from rung.corpus.documents import documents
from rung.errors import RungError
from rung.model.decoder import with_vocabulary
from rung.report.progress import track
from rung.run.choose import choose
from rung.run.folder import TOKENIZER, TOKENS
from rung.tokens.store import TokenStore, build_store
from rung.tokens.tokenizer import Tokenizer
from rung.train.schedule import steps_of

Say = Callable[[str], None]

_VALIDATIONS_PER_RUN = 10


@dataclass(frozen=True)
class Prepared:
    """All that training needs before a model is built."""

    config: Config
    tokenizer: Tokenizer
    store: TokenStore


def prepare(
    sources: Sequence[str], base: Config | None, changes: Mapping[str, Any], folder: Path, say: Say
) -> Prepared:
    """Make the tokenizer and the tokens of a run in ``folder``, and resolve its config.

    Args:
        sources: text, or one token store that was built before.
        base: the config that ``changes`` are put into; ``None``: one is chosen for the text.
        changes: ``{path: value}``.
        folder: an empty folder.
        say: told, line by line, what was chosen and made.

    Raises:
        RungError: anything that is wrong with the config or the sources; contradictions before any work.
    """
    if len(sources) == 1 and (Path(sources[0]) / "dataset.json").exists():
        return _from_store(Path(sources[0]), base, changes, folder, say)
    if base is not None:
        settings.resolve(_adapted(base, changes, say))
    files = corpus_sources.resolve(sources)
    total = sum(source.size for source in files)
    config = _adapted(base if base is not None else _chosen(total, say), changes, say)
    settings.resolve(config)
    tokenizer = make_tokenizer(files, config, say)
    with track(total, "tokenizing") as on_progress:
        store = build_store(files, tokenizer, folder / TOKENS, config.data, on_progress=on_progress)
    tokenizer.save(folder / TOKENIZER)
    return Prepared(finish_config(config, tokenizer, store, say), tokenizer, store)


def make_tokenizer(files: Sequence[corpus_sources.Source], config: Config, say: Say) -> Tokenizer:
    """Return the tokenizer that the config names: loaded from its file, or trained on the text."""
    wanted = config.tokenizer
    if wanted.file:
        return Tokenizer.load(wanted.file, allow_lossy=wanted.allow_lossy)
    with track(sum(source.size for source in files), "training the tokenizer") as on_progress:
        tokenizer = Tokenizer.train(documents(files, config.data, on_progress), wanted)
    if wanted.kind == "bpe" and tokenizer.vocab_size < wanted.vocab_size:
        say(
            f"tokenizer: {tokenizer.vocab_size:,} entries, fewer than the {wanted.vocab_size:,} asked: "
            f"the text has no more pairs that occur {wanted.min_frequency} times"
        )
    return tokenizer


def finish_config(config: Config, tokenizer: Tokenizer, store: TokenStore, say: Say) -> Config:
    """Return the config with everything filled in that the data decide: vocabulary, context, length of the run."""
    train_tokens = len(store.split("train"))
    held_out_tokens = len(store.split("validation")) if "validation" in store.splits else 0
    changes: dict[str, Any] = {"model.vocab_size": with_vocabulary(config.model, tokenizer.vocab_size).vocab_size}
    if changes["model.vocab_size"] < tokenizer.vocab_size:
        raise RungError(
            f"model.vocab_size {config.model.vocab_size} is below the tokenizer's {tokenizer.vocab_size}",
            "leave model.vocab_size at 0 to take the tokenizer's",
        )
    context = config.model.context_length
    if context > train_tokens - 1:
        changes["model.context_length"] = context = train_tokens - 1
        changes["model.n_positions"] = 0
        say(f"context shortened to {context} tokens: the training text has only {train_tokens:,}")
    tokens_per_step = config.train.batch_size * context
    steps = _steps(config, train_tokens, tokens_per_step, say)
    changes["train.steps"] = steps
    changes |= {"train.tokens": 0, "train.epochs": 0.0}
    each = max(1, steps // _VALIDATIONS_PER_RUN)
    changes["evaluate.every_steps"] = every = config.evaluate.every_steps or each
    changes["sample.every_steps"] = config.sample.every_steps or every
    changes["checkpoint.every_steps"] = config.checkpoint.every_steps or every
    say(
        f"text: {_described(store)}; {train_tokens:,} tokens to train on, {held_out_tokens:,} held out; "
        f"vocabulary {tokenizer.vocab_size:,}"
    )
    return settings.resolve(settings.override(config, changes))


def _steps(config: Config, train_tokens: int, tokens_per_step: int, say: Say) -> int:
    train = config.train
    tokens = train.tokens or round(train.epochs * train_tokens)
    if not train.steps and not tokens:
        raise RungError("the run has no length", "give --steps, --tokens or --epochs")
    steps = train.steps or steps_of(tokens, tokens_per_step)
    say(
        f"{steps:,} steps of {train.batch_size} x {tokens_per_step // train.batch_size} tokens: "
        f"{steps * tokens_per_step / max(1, train_tokens):.2f} passes over the training text"
    )
    return steps


def _described(store: TokenStore) -> str:
    n_documents = sum(len(store.split(name).document_starts) for name in store.splits)
    n_bytes = sum(store.split(name).text_bytes for name in store.splits)
    empty = f" ({store.empty_documents} more are empty)" if store.empty_documents else ""
    return f"{n_documents:,} document{'s' * (n_documents != 1)}{empty}, {n_bytes:,} bytes"


def _chosen(total: int, say: Say) -> Config:
    config, choices = choose(total, jax.default_backend())
    for choice in choices:
        say(f"chosen: {choice.path} = {choice.value} ({choice.reason})")
    return config


def _adapted(base: Config, changes: Mapping[str, Any], say: Say) -> Config:
    config, notes = settings.adapt(base, changes)
    for note in notes:
        say(note)
    return config


def _from_store(path: Path, base: Config | None, changes: Mapping[str, Any], folder: Path, say: Say) -> Prepared:
    store = TokenStore.open(path)
    total = sum(store.split(name).text_bytes for name in store.splits)
    config = _adapted(base if base is not None else _chosen(total, say), changes, say)
    settings.resolve(config)
    tokenizer = Tokenizer.load(path / TOKENIZER, allow_lossy=config.tokenizer.allow_lossy)
    if tokenizer.hash != store.tokenizer_hash:
        raise RungError(f"{path / TOKENIZER} is not the tokenizer of the tokens in {path}", "build the store again")
    tokenizer.save(folder / TOKENIZER)
    return Prepared(finish_config(config, tokenizer, store, say), tokenizer, store)


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not.

    Raises:
        RungError: ``path`` exists and is not to be overwritten.
    """
    import shutil
    import tempfile

    if path.exists() and not overwrite and (not path.is_dir() or any(path.iterdir())):
        raise RungError(
            f"{path} exists already", f"continue it with `rung resume {path}`, or give --overwrite or --run"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise RungError(f"cannot make {path}: {error.strerror}", "choose another place with --run") from None
    try:
        temporary.chmod(0o755)
        yield temporary
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
