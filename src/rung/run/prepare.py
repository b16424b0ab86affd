"""From sources to a token store and a config in which nothing is left open."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rung import config as settings
from rung.config import Config
from rung.corpus import sources as corpus_sources
from rung.corpus.documents import documents, text_size
from rung.disk import cannot, check_replaceable, make_public, publish
from rung.errors import RungError
from rung.model.decoder import with_vocabulary
from rung.report.progress import track
from rung.report.words import plural
from rung.run.choose import choose
from rung.run.folder import CONFIG, ENVIRONMENT, FILES, FOLDERS, TOKENIZER, TOKENS, held
from rung.run.tokens import is_tokens, open_store, say_of_in_place, tokenizer_of
from rung.tokens.mixture import MixedStore, Store, check_weights, parts
from rung.tokens.store import TokenStore, build_store
from rung.tokens.tokenizer import Tokenizer
from rung.train.schedule import steps_of

Say = Callable[[str], None]

_VALIDATIONS_PER_RUN = 10
_NORMS_PER_RUN = 100


@dataclass(frozen=True)
class Prepared:
    """All that training needs before a model is built."""

    config: Config
    tokenizer: Tokenizer
    store: Store


def prepare(
    sources: Sequence[str], base: Config | None, changes: Mapping[str, Any], folder: Path, say: Say
) -> Prepared:
    """Make the tokenizer and the tokens of a run in ``folder``, and resolve its config.

    Args:
        sources: text; or token stores that were built before, several of which are a mixture. Text with
            ``data.weights`` is a mixture of its sources.
        base: the config that ``changes`` are put into; ``None``: one is chosen for the text.
        changes: ``{path: value}``.
        folder: an empty folder.
        say: told, line by line, what was chosen and made.

    Raises:
        RungError: anything that is wrong with the config or the sources; contradictions before any work.
    """
    _check_settled(changes)
    made = [source for source in sources if is_tokens(source)]
    if made and len(made) < len(sources):
        text = next(source for source in sources if source not in made)
        raise RungError(
            f"{made[0]} holds tokens, and {text}, which is named beside it, is text",
            "make token stores of them first, with its tokenizer: rung tokens build",
        )
    base = _with_weights(base, changes, len(sources), say)
    if made:
        return _from_tokens([Path(source) for source in made], base, changes, folder, say)
    files = corpus_sources.resolve(sources)
    total = sum(source.size for source in files)
    config = _adapted(base if base is not None else _chosen(_text_size(files, changes), changes, say), changes, say)
    _check(config)
    if config.data.weights:
        check_weights(config.data.weights, len(sources))
    tokenizer = make_tokenizer(files, config, say)
    store: Store
    if config.data.weights:
        store = _built_apart(sources, tokenizer, config, folder)
    else:
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
    learned = tokenizer.trained_on
    if learned and learned.used_bytes < learned.total_bytes:
        say(
            f"tokenizer: learned from {learned.used_bytes:,} of {learned.total_bytes:,} bytes, a sample of the text's "
            f"pieces: all of it would take more than tokenizer.training_memory {wanted.training_memory:,} bytes"
        )
    if wanted.kind == "bpe" and tokenizer.vocab_size < wanted.vocab_size:
        say(
            f"tokenizer: {tokenizer.vocab_size:,} entries, fewer than the {wanted.vocab_size:,} asked: "
            f"the text has no more pairs that occur {wanted.min_frequency} times"
        )
    return tokenizer


def finish_config(config: Config, tokenizer: Tokenizer, store: Store, say: Say) -> Config:
    """Return the config with everything filled in that the data decide: vocabulary, context, length of the run."""
    train = parts(store, "train")
    train_tokens, shortest = (choose(len(part.tokens) for part in train) for choose in (sum, min))
    held_out_tokens = sum(len(part.tokens) for part in parts(store, "validation")) if _held_out(store) else 0
    changes: dict[str, Any] = {"model.vocab_size": with_vocabulary(config.model, tokenizer.vocab_size).vocab_size}
    if changes["model.vocab_size"] < tokenizer.vocab_size:
        raise RungError(
            f"model.vocab_size {config.model.vocab_size} is below the tokenizer's {tokenizer.vocab_size}",
            "leave model.vocab_size at 0 to take the tokenizer's",
        )
    context = config.model.context_length
    if context > shortest - 1:
        changes["model.context_length"] = context = shortest - 1
        changes["model.n_positions"] = 0
        which = "the training text has only" if len(train) == 1 else "the shortest of the training texts has"
        say(f"context shortened to {context} tokens: {which} {shortest:,}")
    tokens_per_step = config.train.batch_size * context
    steps = _steps(config, train_tokens, tokens_per_step, say)
    changes["train.steps"] = steps
    changes |= {"train.tokens": 0, "train.epochs": 0.0}
    if isinstance(store, MixedStore):
        changes["data.weights"] = store.weights
        _say_mixture(store, steps * tokens_per_step, say)
    each = max(1, steps // _VALIDATIONS_PER_RUN)
    changes["evaluate.every_steps"] = every = config.evaluate.every_steps or each
    changes["sample.every_steps"] = config.sample.every_steps or every
    changes["checkpoint.every_steps"] = config.checkpoint.every_steps or every
    changes["train.norms_every_steps"] = config.train.norms_every_steps or max(1, steps // _NORMS_PER_RUN)
    say(
        f"text: {_described(store)}; {train_tokens:,} tokens to train on, {held_out_tokens:,} held out; "
        f"vocabulary {tokenizer.vocab_size:,}"
    )
    return settings.resolve(settings.override(config, changes))


def _check(config: Config) -> None:
    """Find contradictions, and what is missing, before any work."""
    settings.resolve(config)
    if not (config.train.steps or config.train.tokens or config.train.epochs):
        raise RungError("the run has no length", "give --steps, --tokens or --epochs")


def _steps(config: Config, train_tokens: int, tokens_per_step: int, say: Say) -> int:
    train = config.train
    tokens = train.tokens or max(1, round(train.epochs * train_tokens))
    steps = train.steps or steps_of(tokens, tokens_per_step)
    say(
        f"{steps:,} steps of {train.batch_size} x {tokens_per_step // train.batch_size} tokens: "
        f"{steps * tokens_per_step / max(1, train_tokens):.2f} passes over the training text"
    )
    return steps


def _held_out(store: Store) -> bool:
    return "validation" in store.splits


def _say_mixture(store: MixedStore, run_tokens: int, say: Say) -> None:
    for part in parts(store, "train"):
        say(
            f"mixture: {part.name}, {part.share:.2%} of the rows: {part.share * run_tokens / len(part.tokens):.2f} "
            f"passes over its {len(part.tokens):,} tokens"
        )
    without = [name for name, one in zip(store.names, store.stores, strict=True) if "validation" not in one.splits]
    if without and _held_out(store):
        say(f"nothing is held out of {', '.join(without)}: validation is that of the others, by their shares")


def _with_weights(base: Config | None, changes: Mapping[str, Any], n_sources: int, say: Say) -> Config | None:
    """Return ``base`` without weights that are for another number of sources, as those of a run started from."""
    if base is None or "data.weights" in changes or len(base.data.weights) in (0, n_sources):
        return base
    say(f"data.weights are for {len(base.data.weights)} sources and there are {n_sources}: they are left out")
    return settings.override(base, {"data.weights": ()})


def _built_apart(sources: Sequence[str], tokenizer: Tokenizer, config: Config, folder: Path) -> MixedStore:
    """Build a token store of each source, in the folder of the run's tokens."""
    if config.data.validation:
        raise RungError(
            f"data.validation is {' '.join(config.data.validation)}, and data.weights make a mixture of the sources",
            "of each source a part is held out: leave data.validation out, or build token stores with one each",
        )
    stores: list[TokenStore] = []
    for number, source in enumerate(sources):
        files = corpus_sources.resolve([source])
        stem = Path(source).resolve().stem if source != corpus_sources.STDIN else "standard-input"
        taken = [store.path.name for store in stores]
        out = folder / TOKENS / (stem if stem not in taken else f"{stem}-{number + 1}")
        with track(sum(file.size for file in files), f"tokenizing {source}") as on_progress:
            stores.append(build_store(files, tokenizer, out, config.data, on_progress=on_progress))
    return MixedStore(stores, config.data.weights)


def _described(store: Store) -> str:
    splits = [part.tokens for name in store.splits for part in parts(store, name)]
    n_bytes = sum(split.text_bytes for split in splits)
    about = "about " if any(split.estimated for split in splits) else ""
    if any(split.n_documents is None for split in splits):
        return f"documents that nobody has counted, {about}{n_bytes:,} bytes"
    n_documents = sum(split.n_documents or 0 for split in splits)
    if len(splits) == 2 and splits[0].names[-1:] == splits[1].names[:1] != []:
        n_documents -= 1  # one document, cut in two
    empty = f" ({store.empty_documents:,} more without text)" if store.empty_documents else ""
    return f"{plural(n_documents, 'document')}{empty}, {about}{n_bytes:,} bytes"


def _text_size(files: Sequence[corpus_sources.Source], changes: Mapping[str, Any]) -> int:
    reading = {path: value for path, value in changes.items() if path.startswith("data.")}
    return text_size(files, settings.override(Config(), reading).data)


def _chosen(text_bytes: int, given: Mapping[str, Any], say: Say) -> Config:
    config, choices = choose(text_bytes, jax.default_backend(), given)
    for choice in choices:
        say(f"chosen: {choice.path} = {choice.value} ({choice.reason})")
    return config


def _adapted(base: Config, changes: Mapping[str, Any], say: Say) -> Config:
    config, notes = settings.adapt(base, changes)
    for note in notes:
        say(note)
    return config


# What decides the tokens, and so is settled where they are made already.
_SETTLED = (
    "tokenizer.kind",
    "tokenizer.vocab_size",
    "tokenizer.min_frequency",
    "tokenizer.training_memory",
    "tokenizer.byte_fallback",
)
_READING = ("data.encoding", "data.format", "data.text_column", "data.separator")
_SETTLED_IN_FILE = (*_SETTLED, *_READING, "data.validation")
_SETTLED_IN_STORE = (*_SETTLED_IN_FILE, "data.validation_fraction")


def _check_settled(changes: Mapping[str, Any]) -> None:
    """Refuse settings of a tokenizer beside the file of one."""
    for name in _SETTLED:
        if changes.get("tokenizer.file") and name in changes:
            raise RungError(
                f"{name} is {changes[name]!r}, and tokenizer.file is {changes['tokenizer.file']!r}",
                f"a tokenizer that is made already has it settled: leave --{name.replace('_', '-')} out",
            )


def _from_tokens(
    paths: Sequence[Path], base: Config | None, changes: Mapping[str, Any], folder: Path, say: Say
) -> Prepared:
    for path in paths:
        for name in _SETTLED_IN_FILE if path.is_file() else _SETTLED_IN_STORE:
            if name in changes:
                raise RungError(
                    f"{name} is {changes[name]!r}, and the tokens in {path} are made already",
                    f"leave --{name.replace('_', '-')} out, or build the tokens again with it",
                )
    tokenizer = _tokenizer_of(paths[0], base, changes)
    default = Config().data.validation_fraction
    fraction = changes.get("data.validation_fraction", base.data.validation_fraction if base is not None else default)
    asked = "data.validation_fraction" in changes or fraction != default
    weights = changes.get("data.weights", base.data.weights if base is not None else ())
    if weights:
        check_weights(weights, len(paths))
    store = open_store(paths, tokenizer, fraction if asked else None, weights)
    if paths[0].is_file():
        say_of_in_place(store, say)
    made = {"tokenizer.vocab_size": tokenizer.vocab_size, **_data_settings(store)}
    changes = {**changes, **made}
    config = _adapted(base if base is not None else _chosen(store.text_bytes, changes, say), changes, say)
    _check(config)
    tokenizer.save(folder / TOKENIZER)
    return Prepared(finish_config(config, tokenizer, store, say), tokenizer, store)


def _tokenizer_of(path: Path, base: Config | None, changes: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that made the tokens at ``path``: the store's own, or for a bare file the one named."""
    named = changes.get("tokenizer.file") or (base.tokenizer.file if base is not None and path.is_file() else "")
    lossy = changes.get("tokenizer.allow_lossy", base.tokenizer.allow_lossy if base is not None else False)
    return tokenizer_of(path, named, lossy)


def _data_settings(store: Store) -> dict[str, Any]:
    """Return the settings that a store was made with, as ``{path: value}``."""
    known = dict(settings.fields(Config))
    made = {f"data.{name}": value for name, value in store.info.get("data", {}).items()}
    return {path: value for path, value in made.items() if path in known}


@contextlib.contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder that becomes ``path`` when the block ends well, and vanishes when it does not.

    Raises:
        RungError: ``path`` exists, and is not to be overwritten or is no run; or it cannot be made.
    """
    made: list[Path] = []
    with cannot(f"make {path}", "choose another place with --run"):
        _check_free(path, overwrite)
        real = path.resolve()
        made = [parent for parent in (real.parent, *real.parent.parents) if not parent.exists()]
        real.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{real.name[:100]}-", dir=real.parent))
    try:
        make_public(temporary)
        yield temporary
        publish(temporary, real)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # something else has come into it
                parent.rmdir()
        raise


def _check_free(path: Path, overwrite: bool) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    is_run = all((path / name).is_file() for name in (CONFIG, ENVIRONMENT))
    if not overwrite:
        continues = f"continue it with `rung resume {shlex.quote(str(path))}`, or give --overwrite or --run"
        raise RungError(f"{path} exists already", continues if is_run else "choose another place with --run")
    if not is_run:
        raise RungError(f"{path} is not a run, so it is not overwritten", "choose another place with --run")
    check_replaceable(path, map(re.escape, FILES), FOLDERS, "move it elsewhere, or choose another place with --run")
    with held(path):  # refused while another process trains in it
        pass
