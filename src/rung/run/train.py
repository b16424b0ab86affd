"""The verb ``train``: a run folder is made with all that the run needs, and then trained in."""

from __future__ import annotations

import dataclasses
import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung import config as settings
from rung.config import Config
from rung.corpus.folder import is_corpus
from rung.errors import RungError
from rung.mesh import make_mesh
from rung.model import Decoder
from rung.report.trackers import check_trackers
from rung.run.folder import ENVIRONMENT, Run, environment, record_data, write_config
from rung.run.prepare import Say, new_folder, prepare
from rung.run.starting import Start, begin, open_start
from rung.run.tokens import is_tokens
from rung.run.training import Training, say_to_standard_error
from rung.tokens.mixture import keep_apart, parts, paths_of


def train(
    sources: str | Path | Sequence[str | Path] = (),
    config: Config | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    start: str | Path | None = None,
    keep_optimizer: bool = False,
    time_limit: float | None = None,
    profile: tuple[int, int] | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Train a model on text, and write a run folder with everything that came of it.

    Args:
        sources: files, folders, globs, ``-`` for standard input, or token stores, several of which are a mixture;
            none: the tokens of ``start``.
        config: what to train, such as ``rung.preset("demo")``; ``None``: that of ``start``, or chosen for the text.
        changes: settings changed in it, ``{"model.d_model": 256}``.
        run: the run folder; ``None``: ``runs/<name>``, the name being the config's, or that of the first source.
        overwrite: replace a run that is there.
        start: begin with the weights of another run: its folder for the best by validation, ``folder@STEP`` or
            ``folder@latest`` for those of a checkpoint. Model and tokenizer are then that run's.
        keep_optimizer: take the optimizer's state over too, from a checkpoint.
        time_limit: seconds after which to stop, as on a signal.
        profile: first and last step of a profiler trace, counted from 1, which goes to ``profile/`` in the run folder.
        say: told what is chosen and done; ``None``: standard error.

    Returns:
        ``run``, ``steps``, ``tokens``, ``parameters``, ``train_loss`` (nats per token, the mean of the last
        ``train_loss_steps`` steps),
        ``validation_loss``, ``perplexity``, ``bits_per_byte`` (all of the last validation; ``None`` without one),
        ``seconds`` (of training), ``report`` (its path), ``stopped`` (why it ended early, or ``None``).

    Raises:
        RungError: anything wrong with the sources or settings; nothing is left behind.
        Diverged: too many updates in a row were not finite.
    """
    say = say or say_to_standard_error
    changes = dict(changes or {})
    names = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    started = open_start(str(start), keep_optimizer) if start else None
    if started is not None:
        changes = started.changes(changes)
        config = config or started.config()
        names = names or [str(path) for path in paths_of(started.run.store)]
    elif keep_optimizer:
        raise RungError("the optimizer is to be kept, and no run to start from is named", "name it: --from RUN")
    if not names:
        raise RungError("nothing to train on", "name files, folders, or token stores; or a run to start from")
    folder = Path(run) if run else Path("runs") / _name(names, config, changes, started)
    with new_folder(folder, overwrite) as temporary:
        _refuse_own([*names, *([str(started.run.path)] if started else [])], folder)
        # Contradictions are found, and devices claimed, before any work; JAX can emulate devices only at first.
        adapted, _ = settings.adapt(config or Config(), changes)
        if config is not None:
            settings.resolve(adapted)
        check_trackers(adapted)
        mesh = make_mesh(adapted.mesh)
        if adapted.compute.attention != "auto":
            _check_attention(adapted, segments=False)
        prepared = prepare(names, config, changes, temporary, say)
        _check_profile(profile, prepared.config.train.steps)
        _check_attention(
            prepared.config, keep_apart(parts(prepared.store, "train"), prepared.config.data.cross_documents)
        )
        record_data(temporary, prepared.store, prepared.tokenizer, final=folder)
        write_config(temporary, prepared.config)
        (temporary / ENVIRONMENT).write_text(json.dumps(environment(mesh), indent=2) + "\n", encoding="utf-8")
        if started is not None:
            say(str(started))
            new = Training(Run(temporary), mesh, say)
            begin(started, new.run, new.model, new.initial_state(), new.identity, folder)
    return Training(Run(folder), mesh, say, profile, time_limit).begin()


def _refuse_own(sources: Sequence[str], folder: Path) -> None:
    """Refuse to train from what is in the folder that will be replaced."""
    for source in sources:
        if folder.exists() and Path(source).resolve().is_relative_to(folder.resolve()):
            raise RungError(f"{source} is in {folder}, which would be replaced", "choose another place with --run")
        if (is_tokens(source) or is_corpus(source)) and folder.resolve().is_relative_to(Path(source).resolve()):
            raise RungError(f"{folder} is in {source}, which it trains on", "choose another place with --run")


def _check_profile(profile: tuple[int, int] | None, steps: int) -> None:
    if profile and not 1 <= profile[0] <= profile[1] <= steps:
        raise RungError(
            f"steps {profile[0]} to {profile[1]} are to be profiled, and the run has steps 1 to {steps}",
            "choose steps within the run, as --profile 10:20",
        )


def _name(sources: Sequence[str], config: Config | None, changes: Mapping[str, Any], start: Start | None) -> str:
    name = changes.get("name") or (config.name if config else "")
    if not name and start is not None:
        name = f"{start.run.path.resolve().name}-from-{start.step}"
    if not name:
        # Of a pattern, the folder that it is in.
        parts = [part for part in Path(sources[0]).resolve().parts if not glob.has_magic(part)] if sources else []
        name = "standard-input" if list(sources) == ["-"] else Path(*parts).stem if parts else ""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "run"


def _check_attention(config: Config, segments: bool) -> None:
    """Refuse a way of attention that this machine has not, or that cannot do what the model asks for."""
    model = settings.resolve(config).model
    if model.n_layers:
        model = dataclasses.replace(model, vocab_size=model.vocab_size or 1)
        Decoder(model, config.compute).attention_backend(segments=segments)
