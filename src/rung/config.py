"""Every setting of Rung, once: its name, type, default, unit, bounds and help. Nothing else holds a default.

``Config`` is a tree of frozen dataclasses. A field is named by its path, ``model.d_model``; on the command line the
same field is ``--model.d-model``. Where a setting can be derived from others its default is 0, which stands for
"derive it"; ``resolve`` (for what the config alone determines) and the run (for what the data determine) fill it in.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rung.errors import RungError, nearest
from rung.setting import (
    Setting,
    check_bounds,
    check_value,
    field_type,
    fields,
    leaves,
    replaced,
    setting,
    to_dict,
    value_at,
)


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is cut into documents and windows, and what is held out."""

    encoding: str = setting("utf-8", "character encoding of the text files; a byte-order mark wins over it")
    format: Literal["auto", "text", "jsonl", "parquet", "html", "markdown", "epub"] = setting(
        "auto", "what the files hold, unpacked; auto: by their names, and text where those say nothing"
    )
    text_column: str = setting("text", "column of JSON lines or Parquet that holds the text")
    separator: str = setting("", "string that separates documents within a text file; empty: one document a file")
    validation: tuple[str, ...] = setting((), "files or folders held out for validation; empty: a part is held out")
    validation_fraction: float = setting(
        0.1, "part of the text held out, by document, or by position when there is one document", low=0, high=0.5
    )
    weights: tuple[float, ...] = setting(
        (), "of several token stores, or sources, in their order: how often each is read; empty: as large as they are"
    )
    windows: Literal["contiguous", "random"] = setting(
        "contiguous", "training windows: every target once per epoch in shuffled windows, or uniformly random offsets"
    )
    cross_documents: bool = setting(
        False, "let a token see earlier documents in its window, as GPT-2 did; otherwise only its own"
    )


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes token ids."""

    kind: Literal["bpe", "char", "byte"] = setting("bpe", "byte-level BPE, one token a character, or one a byte")
    vocab_size: int = setting(4096, "vocabulary asked of BPE; fewer when the text has fewer merges", low=2)
    min_frequency: int = setting(2, "times that a pair of tokens must occur to be merged", low=1)
    training_memory: int = setting(
        3 << 29,
        "BPE: memory for learning; of text that would take more a keyed sample is learned from",
        unit="bytes",
        low=1 << 20,
    )
    byte_fallback: bool = setting(
        True, "character tokenizer: spell characters outside its alphabet as bytes instead of refusing them"
    )
    file: str = setting("", "use this tokenizer: a tokenizer.json, or a folder with GPT-2's vocabulary and merges")
    allow_lossy: bool = setting(False, "accept a tokenizer file that cannot give every text back")


Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu", "relu_squared"]
DropoutSite = Literal["embedding", "attention", "mlp", "residual"]


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: its size and which parts it is made of."""

    vocab_size: int = setting(0, "rows of the embedding; 0: the tokenizer's vocabulary", low=0)
    context_length: int = setting(256, "tokens that the model sees", unit="tokens", low=1, high=2**24)
    n_positions: int = setting(0, "rows of a learned position table; 0: context_length", low=0)
    n_layers: int = setting(4, "blocks", low=0)
    n_heads: int = setting(4, "query heads", low=1)
    n_kv_heads: int = setting(0, "key and value heads (grouped-query attention); 0: n_heads", low=0)
    d_model: int = setting(256, "width of the residual stream", low=1)
    d_head: int = setting(0, "width of one head; 0: d_model / n_heads", low=0)
    d_ff: int = setting(0, "width of the MLP; 0: 4 x d_model", low=0)
    activation: Activation = setting("gelu", "of the MLP; gelu is the exact form, gelu_tanh GPT-2's approximation")
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "normalisation before each sub-layer and at the end")
    norm_epsilon: float = setting(1e-5, "added to the variance", low=0, open_low=True)
    norm_bias: bool = setting(True, "LayerNorm has a bias")
    positions: Literal["learned", "rope", "none"] = setting("learned", "position information")
    rope_base: float = setting(10_000.0, "longest wavelength of RoPE over 2 pi", unit="tokens", low=1, open_low=True)
    qk_norm: bool = setting(False, "RMSNorm on each head's queries and keys")
    qkv_bias: bool = setting(True, "bias on queries, keys and values")
    attention_output_bias: bool = setting(True, "bias on the attention's output projection")
    mlp_bias: bool = setting(True, "biases in the MLP")
    tied: bool = setting(True, "the output layer is the embedding")
    head_bias: bool = setting(False, "bias on the output layer")
    attention_window: int = setting(
        0,
        "how far back a token sees, itself counted (sliding window); 0: all before it",
        unit="tokens",
        low=0,
        high=2**24,
    )
    attention_soft_cap: float = setting(
        0.0, "attention scores s become cap x tanh(s / cap), as in Gemma 2; 0: as they are", low=0
    )
    logit_soft_cap: float = setting(0.0, "the same for the logits of the output layer; 0: as they are", low=0)
    dropout: float = setting(0.0, "dropout rate", low=0, high=1, open_high=True)
    dropout_sites: tuple[DropoutSite, ...] = setting(
        ("embedding", "attention", "residual"),
        "where dropout acts: embedding, attention (weights), mlp (its hidden layer), residual (sub-layer outputs)",
    )
    init: Literal["gpt2", "fan_in"] = setting(
        "gpt2", "normal(init_std) with residual projections over sqrt(2 n_layers), or variance 1/fan_in"
    )
    init_std: float = setting(0.02, "standard deviation of the gpt2 initialisation", low=0, open_low=True)
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "of activations and matrix products; weights, norms, softmax and loss stay float32"
    )


@dataclass(frozen=True)
class ComputeConfig:
    """How the same mathematics is computed: speed and memory. Nothing here changes what the model is."""

    attention: Literal["auto", "blocked", "cudnn", "splash"] = setting(
        "auto", "in blocks by XLA, by cuDNN (NVIDIA, bfloat16), by the splash kernel (TPU); auto: by device and shape"
    )
    remat: Literal["none", "dots", "block", "full"] = setting(
        "none",
        "computed again in the backward pass to save memory: nothing; all but matrix products; all but the inputs of "
        "layers; all but the inputs of every sqrt(n_layers)-th layer",
    )
    scan_layers: bool = setting(
        False, "compile one layer and run it n_layers times: deep models compile sooner, steps may be slower"
    )
    matmul_precision: Literal["float32", "tensorfloat32", "bfloat16"] = setting(
        "float32", "of float32 matrix products, where the device has a choice (GPU, TPU); a CPU has float32 only"
    )


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation: how long, how fast, in what batches."""

    seed: int = setting(42, "of initialisation, shuffling and dropout", low=0, high=2**32 - 1)
    batch_size: int = setting(32, "sequences per step, over all devices", unit="sequences", low=1, high=2**20)
    micro_batch_size: int = setting(
        0, "sequences whose gradient is computed at once; 0: the whole batch", unit="sequences", low=0
    )
    steps: int = setting(0, "optimizer steps; 0: from tokens or epochs", unit="steps", low=0)
    tokens: int = setting(0, "length of the run in target tokens, rounded up to steps", unit="tokens", low=0)
    epochs: float = setting(0.0, "length of the run in passes over the training text", unit="epochs", low=0)
    optimizer: Literal["adamw", "lion", "adafactor", "muon", "normuon"] = setting(
        "adamw", "of all weights; Muon and NorMuon: of the hidden matrices, and AdamW of the rest"
    )
    learning_rate: float = setting(
        1e-3,
        "peak learning rate; the default is for AdamW: another optimizer named without a rate multiplies it",
        low=0,
    )
    muon_learning_rate: float = setting(0.02, "peak learning rate of the matrices under Muon and NorMuon", low=0)
    final_learning_rate_ratio: float = setting(0.1, "learning rate at the last step over its peak", low=0, high=1)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "after warm-up; wsd is warm-up, stable, linear decay"
    )
    warmup_steps: int = setting(0, "linear warm-up", unit="steps", low=0)
    warmup_tokens: int = setting(0, "linear warm-up, in target tokens; instead of warmup_steps", unit="tokens", low=0)
    warmup_fraction: float = setting(
        0.0, "linear warm-up, as a part of the run; instead of warmup_steps", low=0, high=1
    )
    decay_steps: int = setting(0, "wsd: length of the decay; 0: a fifth of the run", unit="steps", low=0)
    decay_tokens: int = setting(0, "wsd: length of the decay; instead of decay_steps", unit="tokens", low=0)
    beta1: float = setting(
        0.9, "AdamW: decay of the mean of gradients; Lion: its part in an update", low=0, high=1, open_high=True
    )
    beta2: float = setting(
        0.95, "AdamW: decay of the mean of squares; Lion: of the mean of gradients", low=0, high=1, open_high=True
    )
    epsilon: float = setting(1e-8, "AdamW: added to the root of the mean square", low=0, open_low=True)
    weight_decay: float = setting(0.1, "decoupled, on matrices only, times the learning rate", low=0)
    label_smoothing: float = setting(
        0.0, "part of a target's probability that is spread evenly over the vocabulary", low=0, high=1, open_high=True
    )
    z_loss: float = setting(
        0.0,
        "adds so much times the squared logarithm of the softmax's denominator, which keeps it near 0",
        low=0,
        high=1000,
    )
    clip_norm: float = setting(1.0, "largest global norm of the gradient; 0: no clipping", low=0)
    max_skipped: int = setting(10, "stop after this many non-finite updates in a row", unit="steps", low=1)
    log_every_steps: int = setting(1, "steps between lines of metrics.jsonl", unit="steps", low=1)
    norms_every_steps: int = setting(
        0, "steps between norms of weights and updates; 0: a hundred in the run", unit="steps", low=0
    )
    spike_threshold: float = setting(
        8.0, "a loss is marked as a spike so many robust standard deviations over the recent median; 0: never", low=0
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Validation during training: always the whole validation split, in the same fixed batches."""

    every_steps: int = setting(
        0, "steps between validations; 0: ten in the run; at the end always", unit="steps", low=0
    )
    batch_size: int = setting(0, "sequences at once; 0: train.batch_size", unit="sequences", low=0)


@dataclass(frozen=True)
class SampleConfig:
    """Text generated from fixed prompts during training."""

    every_steps: int = setting(0, "steps between samples; 0: with every validation", unit="steps", low=0)
    prompts: tuple[str, ...] = setting(("",), "what to continue; the empty prompt begins a document")
    max_tokens: int = setting(100, "length of a sample", unit="tokens", low=0)
    temperature: float = setting(0.8, "0 takes the most probable token", low=0)
    top_k: int = setting(0, "draw among the k most probable tokens; 0: among all", low=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving for a later resume."""

    every_steps: int = setting(0, "steps between checkpoints; 0: with every validation", unit="steps", low=0)
    every_minutes: float = setting(
        0.0, "minutes between checkpoints, besides those by steps; 0: only by steps", unit="minutes", low=0
    )
    keep: int = setting(2, "newest checkpoints to keep; the best by validation is kept besides", low=1)
    keep_every_steps: int = setting(
        0, "checkpoints of multiples of so many steps are kept for good; 0: none", unit="steps", low=0
    )


@dataclass(frozen=True)
class TrackConfig:
    """Where else a run is followed, beside its own log and report."""

    tensorboard: bool = setting(False, "write TensorBoard files to tensorboard/ in the run folder (extra tensorboard)")
    wandb: bool = setting(False, "write to Weights & Biases (extra wandb)")
    wandb_project: str = setting("rung", "project at Weights & Biases")
    wandb_mode: Literal["offline", "online"] = setting(
        "offline", "offline keeps everything in wandb/ in the run folder; online sends it, and needs an account"
    )
    hardware_every_seconds: float = setting(
        10.0, "seconds between readings of processor, memory and GPUs; 0: none", unit="seconds", low=0
    )


@dataclass(frozen=True)
class MeshConfig:
    """Devices by named axis."""

    data: int = setting(1, "devices that the batch is split over", unit="devices", low=1)


@dataclass(frozen=True)
class GenerateConfig:
    """How tokens are drawn when text is generated."""

    max_tokens: int = setting(200, "most tokens to generate", unit="tokens", low=0, high=10**7)
    temperature: float = setting(0.8, "divides the logits; 0 takes the most probable token", low=0)
    top_k: int = setting(0, "draw among the k most probable tokens; 0: among all", low=0)
    top_p: float = setting(
        1.0, "draw among the fewest tokens with this probability together", low=0, high=1, open_low=True
    )
    min_p: float = setting(0.0, "draw among tokens at least this probable, relative to the best", low=0, high=1)
    repetition_penalty: float = setting(
        1.0, "divides positive and multiplies negative logits of tokens already seen; 1: off", low=0, open_low=True
    )
    seed: int = setting(0, "of the draw", low=0, high=2**32 - 1)
    samples: int = setting(1, "continuations of the prompt, drawn together", low=1, high=1024)
    stop: tuple[str, ...] = setting((), "end at the first of these strings, which is not printed")
    ignore_end: bool = setting(False, "go on past the end of the text")


Filter = Literal["length", "letters", "scripts", "repetition", "languages", "duplicates", "near-duplicates"]


@dataclass(frozen=True)
class CleanConfig:
    """Which documents of a corpus stay: the limits of the filters, and what counts as a duplicate or an overlap."""

    skip: tuple[Filter, ...] = setting((), "a filter that is left out")
    min_words: int = setting(
        50, "length: least words of a document; a character of Japanese, Chinese or Thai counts as one", low=0
    )
    max_words: int = setting(0, "length: most words of a document; 0: no bound", low=0)
    min_letters: float = setting(0.5, "letters: least part of the characters, white space not counted", low=0, high=1)
    scripts: tuple[str, ...] = setting((), "scripts: one that letters may be of, as Latin, Hiragana; empty: any")
    min_script: float = setting(0.9, "scripts: least part of the letters that are of these scripts", low=0, high=1)
    repetition: float = setting(
        1.0,
        "repetition: limits on repeated lines and word sequences, in those of Gopher; 2 is twice as lenient",
        low=0,
        open_low=True,
    )
    languages: tuple[str, ...] = setting((), "languages: one that stays, as en, ja (ISO 639-1); empty: any")
    min_language: float = setting(
        0.65, "languages: least probability that a document is in one of these", low=0, high=1
    )
    similarity: float = setting(
        0.8,
        "near-duplicates: part of word sequences shared (Jaccard) from which a later document goes",
        low=0.3,
        high=1,
    )
    shingle_words: int = setting(5, "near-duplicates: words of a sequence", low=1, high=100)
    permutations: int = setting(128, "near-duplicates: numbers that a document is estimated by", low=16, high=1024)
    validation: tuple[str, ...] = setting((), "validation text, that training text is held against")
    evaluation: tuple[str, ...] = setting((), "text of an evaluation, that training text is held against")
    held_out: float = setting(
        0.0,
        "contamination: also what `rung tokens build --validation-fraction` will hold out of what stays: that fraction",
        low=0,
        high=0.5,
    )
    overlap_words: int = setting(13, "contamination: words in a row that are an overlap", low=2, high=1000)
    overlap_characters: int = setting(
        30, "contamination: the same, where a text is mostly in a script without spaces", low=2, high=1000
    )
    remove_contaminated: bool = setting(False, "contamination: take out documents with an overlap")


@dataclass(frozen=True)
class Config:
    """A whole training run."""

    name: str = setting("", "of the run; empty: from the preset or the source")
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    compute: ComputeConfig = ComputeConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    mesh: MeshConfig = MeshConfig()


# Presets and files


def preset_names() -> list[str]:
    """Return the names of the presets that ship with Rung."""
    return sorted(
        p.name.removesuffix(".toml") for p in resources.files("rung.presets").iterdir() if p.name.endswith(".toml")
    )


def preset(name: str) -> Config:
    """Return a preset by name.

    Raises:
        RungError: there is no such preset; the hint names the nearest.
    """
    if name not in preset_names():
        raise RungError(f"unknown preset {name!r}", nearest(name, preset_names()))
    text = (resources.files("rung.presets") / f"{name}.toml").read_text(encoding="utf-8")
    return from_dict(tomllib.loads(text), where=f"preset {name}")


def load(path: str | Path) -> Config:
    """Read a config from a TOML file; fields not named in it keep their defaults.

    Raises:
        RungError: the file is missing, not TOML, or has an unknown or ill-typed field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return from_dict(tomllib.loads(text), where=str(path))
    except FileNotFoundError:
        raise RungError(
            f"no config file {path}", f"name a TOML file, or a preset: {', '.join(preset_names())}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RungError(f"{path} is not TOML: {error}", "see docs/formats.md for the shape of a config file") from None


def from_dict(values: Mapping[str, Any], base: Config | None = None, where: str = "config") -> Config:
    """Return ``base`` (default: all defaults) with the nested ``values`` put in, and nothing else changed.

    Raises:
        RungError: an unknown field (the hint names the nearest), or a value of another type.
    """
    parts = {path.split(".")[0] for path, _ in fields(Config)}
    for name in values:
        if name not in parts:
            raise RungError(f"{where}: unknown setting {name!r}", nearest(name, parts))
    return override(base or Config(), dict(leaves(values)), where)


def override(config: Config, changes: Mapping[str, Any], where: str = "config") -> Config:
    """Return ``config`` with fields changed by path, as ``{"model.d_model": 256}``.

    Raises:
        RungError: an unknown field, a value of another type, or a value out of its bounds.
    """
    known = dict(fields(Config))
    for path, value in changes.items():
        if path not in known:
            raise RungError(f"{where}: unknown setting {path!r}", nearest(path, known))
        config = replaced(config, path.split("."), _checked(path, known[path], value, where))
    return config


_RATES = {"adamw": 1.0, "lion": 0.3, "adafactor": 40.0, "muon": 4.0, "normuon": 4.0}
"""Learning rates that do about the same, over AdamW's; of Muon and NorMuon for the weights that AdamW keeps.

From the best of the sweeps in ``benchmarks/optimizers.py``, on two texts: Lion 0.5 and 0.3 (its paper: 0.1 to 0.3),
Adafactor 50 and 30, Muon and NorMuon 5 and 3.
"""

_MUONS = ("muon", "normuon")

_NEEDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "tokenizer.allow_lossy": ("tokenizer.file", bool),
    "model.rope_base": ("model.positions", lambda positions: positions == "rope"),
    "model.norm_bias": ("model.norm", lambda norm: norm == "layernorm"),
    "model.init_std": ("model.init", lambda init: init == "gpt2"),
    "model.dropout_sites": ("model.dropout", bool),
    "train.muon_learning_rate": ("train.optimizer", lambda optimizer: optimizer in _MUONS),
    "train.beta1": ("train.optimizer", lambda optimizer: optimizer != "adafactor"),
    "train.beta2": ("train.optimizer", lambda optimizer: optimizer != "adafactor"),
    "train.epsilon": ("train.optimizer", lambda optimizer: optimizer not in ("lion", "adafactor")),
    "train.decay_steps": ("train.schedule", lambda schedule: schedule == "wsd"),
    "train.decay_tokens": ("train.schedule", lambda schedule: schedule == "wsd"),
    "track.wandb_project": ("track.wandb", bool),
    "track.wandb_mode": ("track.wandb", bool),
}
"""Settings that act only with some values of another one: that one, and whether a value of it is such."""

_LENGTHS = ("train.steps", "train.tokens", "train.epochs")
_WARMUPS = ("train.warmup_steps", "train.warmup_tokens", "train.warmup_fraction")


def adapt(base: Config, changes: Mapping[str, Any], where: str = "config") -> tuple[Config, list[str]]:
    """Return ``base`` with a person's ``changes`` put in, and a line for each setting that had to follow them.

    A length of the run (in steps, tokens or epochs) takes the place of the base's in whatever unit; so does a warm-up.
    A base whose warm-up or decay is in steps, made shorter or longer by ``train.steps`` alone, has them scaled with it.
    Another optimizer gets a learning rate that does what that of the base does for its own, and a weight decay that
    takes as much from the matrices of the layers in a step, at the rate that they then have; each unless it is given.
    A given setting that does nothing beside the others is said too.

    Raises:
        RungError: as ``override``.
    """
    follow: dict[str, Any] = {}
    notes = []
    for group in (_LENGTHS, _WARMUPS):
        if any(changes.get(path) for path in group):
            follow |= {path: type(value_at(base, path))(0) for path in group}
    for path, new in _following(base, changes, where).items():
        follow[path] = new
        optimizers = f"{base.train.optimizer} -> {changes['train.optimizer']}"
        if new != value_at(base, path):
            notes.append(f"{path} {value_at(base, path):g} -> {new:g}, as train.optimizer {optimizers}")
    steps = changes.get("train.steps", 0)
    for path in ("train.warmup_steps", "train.decay_steps"):
        old = value_at(base, path)
        if steps and base.train.steps and old and path not in {**follow, **changes}:
            follow[path] = round(old * steps / base.train.steps)
            notes.append(f"{path} {old} -> {follow[path]}, as train.steps {base.train.steps} -> {steps}")
    config = override(base, {**follow, **changes}, where)
    for path in changes:
        if not has_effect(config, path):
            other = _NEEDS[path][0]
            notes.append(f"{path} does nothing here, as {other} is {value_at(config, other) or 'not set'}")
    return config, notes


def has_effect(config: Config, path: str) -> bool:
    """Return whether a setting does anything beside the others of ``config``."""
    if path not in _NEEDS:
        return True
    other, acts = _NEEDS[path]
    return acts(value_at(config, other))


def _following(base: Config, changes: Mapping[str, Any], where: str) -> dict[str, float]:
    """Return the learning rate and the weight decay that another optimizer takes, where they are not given with it."""
    new = override(base, {path: changes[path] for path in _OF_OPTIMIZER if path in changes}, where)
    if new.train.optimizer == base.train.optimizer:
        return {}
    follow = {}
    if "train.learning_rate" not in changes:
        ratio = _RATES[new.train.optimizer] / _RATES[base.train.optimizer]
        follow["train.learning_rate"] = _rounded(base.train.learning_rate * ratio)
        new = override(new, follow)
    if "train.weight_decay" not in changes and (rate := _matrix_rate(new.train)):
        # What decays in a step is the product of the two.
        follow["train.weight_decay"] = _rounded(base.train.weight_decay * _matrix_rate(base.train) / rate)
    return follow


_OF_OPTIMIZER = ("train.optimizer", "train.learning_rate", "train.muon_learning_rate")


def _matrix_rate(train: TrainConfig) -> float:
    """Return the peak learning rate of the matrices of the layers, which are most of a model."""
    return train.muon_learning_rate if train.optimizer in _MUONS else train.learning_rate


def _rounded(number: float) -> float:
    return float(f"{number:.2g}")


def checked(settings: Any, where: str = "flag") -> Any:
    """Return a part of the config, such as a ``GenerateConfig``, after checking every value in it.

    Raises:
        RungError: a value of another type, or out of its bounds.
    """
    for path, declared in fields(type(settings)):
        value = check_value(path, field_type(type(settings), path), value_at(settings, path), where)
        check_bounds(path, declared.metadata["setting"], value, where)
    return settings


def to_toml(config: Config) -> str:
    """Return the config as TOML text that ``load`` reads back to an equal config."""
    import tomli_w

    return tomli_w.dumps(to_dict(config))


def differences(one: Config, two: Config) -> dict[str, tuple[Any, Any]]:
    """Return ``{path: (value in one, value in two)}`` for each setting that differs."""
    first, second = dict(leaves(to_dict(one))), dict(leaves(to_dict(two)))
    return {path: (first[path], second[path]) for path in first if first[path] != second[path]}


# Resolution and contradictions


def resolve(config: Config) -> Config:
    """Return the config with every derivable 0 of the model filled in, after finding contradictions.

    Raises:
        RungError: two settings contradict each other; the line names both and their values.
    """
    model = config.model
    if model.n_layers and not model.d_head and model.d_model % model.n_heads:
        raise RungError(
            f"model.d_model {model.d_model} is not divisible by model.n_heads {model.n_heads}",
            f"take d_model {_round_up(model.d_model, model.n_heads)}, or set model.d_head",
        )
    d_head = model.d_head or model.d_model // model.n_heads
    if d_head == 0:
        raise RungError(
            f"model.d_model {model.d_model} is below model.n_heads {model.n_heads}",
            "take fewer heads, or set model.d_head",
        )
    n_kv_heads = model.n_kv_heads or model.n_heads
    if model.n_heads % n_kv_heads:
        raise RungError(
            f"model.n_heads {model.n_heads} is not divisible by model.n_kv_heads {n_kv_heads}",
            "each key head serves the same number of query heads",
        )
    if model.positions == "rope" and d_head % 2:
        raise RungError(f"model.d_head {d_head} is odd, and RoPE turns pairs of dimensions", "take an even head width")
    n_positions = model.n_positions or model.context_length
    if model.positions == "learned" and model.context_length > n_positions:
        raise RungError(
            f"model.context_length {model.context_length} is over model.n_positions {n_positions}",
            "shorten the context, or enlarge the position table",
        )
    _check_compute(config)
    _check_training(config)
    resolved = {
        "model.d_head": d_head,
        "model.n_kv_heads": n_kv_heads,
        "model.n_positions": n_positions,
        "model.d_ff": model.d_ff or 4 * model.d_model,
        "train.micro_batch_size": config.train.micro_batch_size or config.train.batch_size,
        "evaluate.batch_size": config.evaluate.batch_size or config.train.batch_size,
    }
    return override(config, resolved)


def _check_compute(config: Config) -> None:
    model, compute = config.model, config.compute
    kernel = f"compute.attention {compute.attention}"
    if compute.attention in ("cudnn", "splash") and model.dropout and "attention" in model.dropout_sites:
        raise RungError(
            f"{kernel} has no dropout of attention weights, and model.dropout is {model.dropout:g}",
            "leave attention out of model.dropout_sites, or take compute.attention auto",
        )
    if compute.attention == "cudnn" and model.compute_dtype != "bfloat16":
        raise RungError(
            f"{kernel} computes in bfloat16, unlike model.compute_dtype {model.compute_dtype}",
            "set model.compute_dtype bfloat16, or take compute.attention auto",
        )
    if compute.attention == "cudnn" and model.attention_soft_cap:
        raise RungError(
            f"{kernel} has no soft cap, which model.attention_soft_cap {model.attention_soft_cap:g} asks for",
            "take compute.attention auto",
        )
    if compute.attention == "splash" and config.mesh.data > 1:
        raise RungError(
            f"{kernel} runs on one device, and mesh.data is {config.mesh.data}", "take compute.attention blocked"
        )
    if compute.matmul_precision != "float32" and model.compute_dtype == "bfloat16":
        raise RungError(
            f"compute.matmul_precision {compute.matmul_precision} is for float32 products, "
            "and model.compute_dtype is bfloat16",
            "keep one of the two",
        )


def _check_training(config: Config) -> None:
    train = config.train
    lengths = [name for name in ("steps", "tokens", "epochs") if getattr(train, name)]
    if len(lengths) > 1:
        named = " and ".join(f"train.{name} {getattr(train, name)}" for name in lengths)
        raise RungError(
            f"the length of the run is given more than once: {named}", "keep one of them; set the others to 0"
        )
    for names in (("warmup_steps", "warmup_tokens", "warmup_fraction"), ("decay_steps", "decay_tokens")):
        given = [f"train.{name} {getattr(train, name):g}" for name in names if getattr(train, name)]
        if len(given) > 1:
            raise RungError(
                f"one length is given more than once: {' and '.join(given)}", "keep one; set the others to 0"
            )
    if train.steps and train.warmup_steps > train.steps:
        raise RungError(
            f"train.warmup_steps {train.warmup_steps} is over train.steps {train.steps}",
            "the rate would never reach its peak: shorten the warm-up",
        )
    if train.steps and train.schedule == "wsd" and train.warmup_steps + train.decay_steps > train.steps:
        raise RungError(
            f"train.warmup_steps {train.warmup_steps} + train.decay_steps {train.decay_steps} "
            f"is over train.steps {train.steps}",
            "shorten the warm-up or the decay",
        )
    if train.optimizer in _MUONS and not config.model.n_layers:
        raise RungError(
            f"train.optimizer {train.optimizer} is for matrices of layers, and model.n_layers is 0",
            "take another optimizer, as adamw",
        )
    micro = train.micro_batch_size or train.batch_size
    if train.batch_size % micro:
        raise RungError(
            f"train.batch_size {train.batch_size} is not divisible by train.micro_batch_size {micro}",
            "every micro-batch has the same number of sequences",
        )
    if micro % config.mesh.data:
        raise RungError(
            f"micro-batches of {micro} sequences do not split over mesh data={config.mesh.data}",
            "take a micro-batch that is a multiple of the devices",
        )


# Helpers


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _checked(path: str, declared: dataclasses.Field, value: Any, where: str) -> Any:
    """Return ``value`` in the field's own type, or raise a RungError that says what was expected."""
    kind = field_type(Config, path)
    value = check_value(path, kind, value, where)
    bounds: Setting = declared.metadata["setting"]
    check_bounds(path, bounds, value, where)
    return value
