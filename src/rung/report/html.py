"""The report of a run: one HTML file that needs nothing but itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rung import config as settings
from rung.config import Config
from rung.disk import whole_file
from rung.report.figures import loss_charts, machine_charts, source_charts, training_charts
from rung.report.history import event_table, lineage_table, started_from
from rung.report.metrics import Metrics, read_metrics, read_samples
from rung.report.plots import loss_curves
from rung.report.series import typical
from rung.report.tables import Parameter, config_table, environment_table, parameter_table
from rung.report.words import NOTHING, count, decimal, duration, plural, safe, short
from rung.train.events import Evaluated, Sampled

MOST_SAMPLES = 12  # shown of each prompt
ENDING_STEPS = 100  # the training loss is the mean over so many last steps, as in the result of a run
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # the page may fetch nothing
_MARK = '<meta name="generator" content="Rung">'
_HEAD_BYTES = 1024  # within which the mark stands


@dataclass(frozen=True)
class Run:
    """All that a report is made from."""

    name: str
    config: Config
    metrics: Metrics
    samples: Sequence[Sampled] = ()
    parameters: Sequence[Parameter] = ()
    environment: dict[str, Any] | None = None  # versions and device; None where they were not recorded
    problems: Sequence[str] = ()  # what could not be read
    lineage: dict[str, Any] | None = None  # of lineage.json; None where the run began with fresh weights


def write_report(run_folder: str | Path, parameters: Sequence[Parameter] = ()) -> Path:
    """Write ``report.html`` and ``loss.png`` of a run, finished or not, and return the report's path.

    Reads ``config.toml``, ``metrics.jsonl``, ``samples.jsonl``, ``environment.json`` and ``lineage.json``; any but the
    first may be missing.

    Args:
        run_folder: of the run.
        parameters: (path, shape, count, decays) of each weight, tied ones once.

    Raises:
        RungError: the folder holds no readable ``config.toml``.
    """
    folder = Path(run_folder)
    run = read_run(folder, parameters)
    loss_curves(run.metrics, folder / "loss.png", run.name)
    report = folder / "report.html"
    with whole_file(report) as file:
        # What has no UTF-8 cannot be in a file; `visible` has shown it already where text is free.
        file.write(page(run).encode("utf-8", errors="backslashreplace"))
    return report


def read_run(folder: Path, parameters: Sequence[Parameter] = ()) -> Run:
    """Read what a report needs from a run folder."""
    config = settings.load(folder / "config.toml")
    metrics = read_metrics(folder / "metrics.jsonl")
    samples, problems = read_samples(folder / "samples.jsonl")
    problems = [*metrics.problems, *problems]
    environment, lineage = (_json(folder / name, problems) for name in ("environment.json", "lineage.json"))
    name = config.name or folder.resolve().name
    return Run(name, config, metrics, samples, parameters, environment, problems, lineage)


def page(run: Run) -> str:
    """Return the report as HTML."""
    body = "\n".join(
        [
            _heading(run),
            _numbers(run),
            _section("Loss", loss_charts(run.metrics)),
            _section("Sources", source_charts(run.metrics)),
            _section("Optimisation and speed", training_charts(run.metrics)),
            _section("Machine", machine_charts(run.metrics)),
            _section("Samples", _samples(run)),
            _section("Events", event_table(run.metrics)),
            _section("Lineage", lineage_table(run.lineage) if run.lineage else ""),
            _section("Parameters", parameter_table(run.parameters)),
            _section("Config", config_table(run.config)),
            _section("Device and versions", environment_table(run.environment)),
        ]
    )
    return document(f"{run.name} · Rung report", body)


def document(title: str, body: str, *more_styles: str) -> str:
    """Return an HTML page that needs nothing but itself: the house's style, the body, the reading under the pointer.

    Args:
        title: as text.
        body: as HTML.
        more_styles: names of style sheets beside the house's.
    """
    style, script, *more = (
        resources.files("rung.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js", *more_styles)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{_MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{safe(title)}</title>
<style>
{style}{"".join(more)}</style>
</head>
<body>
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def is_page(path: str | Path) -> bool:
    """Return whether a file is a page that ``document`` made, which a new one may replace."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _MARK.encode() in file.read(_HEAD_BYTES)
    return False


# What a reader wants first


def _heading(run: Run) -> str:
    problems = "".join(f'<p class="problem">{safe(problem)}</p>' for problem in run.problems)
    origin = f'<p class="lead">{safe(started_from(run.lineage))}</p>' if run.lineage else ""
    return f'<header><h1>{safe(run.name)}</h1><p class="lead">{safe(_summary(run))}</p>{origin}{problems}</header>'


def _summary(run: Run) -> str:
    """Return one line on what was trained and how it stands."""
    model, parts = run.config.model, []
    if run.parameters:
        parts.append(f"{short(sum(row[2] for row in run.parameters))} parameters")
    parts.append(f"{plural(model.n_layers, 'layer')}, d_model {model.d_model}, context {model.context_length}")
    step, finished, skipped = _last_step(run.metrics), run.metrics.finished, run.metrics.skipped
    if skipped and skipped[-1].step == step and skipped[-1].in_a_row >= run.config.train.max_skipped:
        parts.append(f"diverged at step {count(step)}")
    elif finished and finished[-1].step >= step:
        parts.append(finished[-1].reason)
    else:
        parts.append(f"at step {count(step)}, not finished" if step else "no step is finished yet")
    return " · ".join(parts)


def _numbers(run: Run) -> str:
    metrics = run.metrics
    steps = metrics.steps
    best = _best(metrics.evaluations)
    speed = typical(steps["tokens_per_second"])
    cells = [
        ("Held-out loss", decimal(best.loss) if best else None, _best_detail(metrics.evaluations)),
        ("Perplexity", decimal(best.perplexity, 2) if best else None, "held out, per token"),
        ("Bits per byte", decimal(best.bits_per_byte) if best and best.bits_per_byte is not None else None, "held out"),
        ("Training loss", *_ending_cell(steps, run.config.train.log_every_steps)),
        ("Steps", count(_last_step(metrics)), _epochs(steps)),
        ("Target tokens", short(_last(steps["tokens"], 0)), count(_last(steps["tokens"], 0))),
        ("Parameters", *_parameter_cell(run.parameters)),
        ("Tokens per second", count(speed) if speed else None, _flops(steps)),
        ("Time", duration(_seconds(metrics)), "training, over all resumes"),
        ("Waiting for data", *_wait_cell(steps)),
    ]
    items = (
        f'<div{" class=first" if n == 0 else ""}><dt>{name}</dt><dd><span class="value">{value or NOTHING}</span>'
        f'<span class="detail">{escape(detail)}</span></dd></div>'
        for n, (name, value, detail) in enumerate(cells)
    )
    return f'<dl class="numbers">{"".join(items)}</dl>'


def _best(evaluations: Sequence[Evaluated]) -> Evaluated | None:
    finite = [event for event in evaluations if np.isfinite(event.loss)]
    return min(finite, key=lambda event: event.loss, default=None)


def _best_detail(evaluations: Sequence[Evaluated]) -> str:
    best = _best(evaluations)
    if best is None:
        return "no validation" if not evaluations else "never finite"
    last = evaluations[-1]
    if last.step == best.step:
        return f"nats per token, at step {count(best.step)}"
    return f"nats per token; best, at step {count(best.step)}; last {decimal(last.loss)}"


def _ending_cell(steps: dict[str, np.ndarray], log_every_steps: int) -> tuple[str | None, str]:
    """Return the mean loss of the last steps whose update was applied, of those that are in the log."""
    ending = steps["loss"][~steps["skipped"]][-max(1, ENDING_STEPS // log_every_steps) :]
    if not len(ending):
        return None, "no step was applied"
    logged = "logged " if log_every_steps > 1 else ""
    return decimal(ending.mean()), f"mean of the last {plural(len(ending), logged + 'step')}"


def _epochs(steps: dict[str, np.ndarray]) -> str:
    epochs = _last(steps["epoch"], np.nan)
    return f"{decimal(epochs, 2)} epochs" if np.isfinite(epochs) else ""


def _parameter_cell(parameters: Sequence[Parameter]) -> tuple[str | None, str]:
    total = sum(row[2] for row in parameters)
    return (short(total), count(total)) if parameters else (None, "not given")


def _wait_cell(steps: dict[str, np.ndarray]) -> tuple[str | None, str]:
    if len(steps["step"]) < 2:
        return None, "share of the time"
    # The first step's wait lies before the first reading of the clock.
    spent = steps["seconds"][-1] - steps["seconds"][0]
    stepped = steps["step"][-1] - steps["step"][0]
    each = np.nanmean(steps["data_wait"][1:]) if np.isfinite(steps["data_wait"][1:]).any() else np.nan
    share = each * stepped / spent if spent > 0 else np.nan
    return (f"{share:.1%}" if np.isfinite(share) else None), "share of the time"


def _flops(steps: dict[str, np.ndarray]) -> str:
    flops = typical(steps["flops_per_second"])
    return f"{short(flops / 1e9)} GFLOP/s achieved" if flops else "median of the steps"


# Samples


def _samples(run: Run) -> str:
    if not run.samples:
        return '<p class="empty">None was written.</p>'
    by_prompt: dict[str, list[Sampled]] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    losses = {event.step: event.loss for event in run.metrics.evaluations}
    return "".join(_of_prompt(prompt, samples, losses) for prompt, samples in by_prompt.items())


def _of_prompt(prompt: str, samples: Sequence[Sampled], losses: dict[int, float]) -> str:
    evenly = np.linspace(0, len(samples) - 1, min(MOST_SAMPLES, len(samples))).round().astype(int)
    shown = "".join(_sample(samples[n], losses) for n in evenly)
    said = f"Prompt: “{safe(prompt)}”" if prompt else "Without a prompt, from the beginning of a document"
    if len(evenly) < len(samples):
        said += f" · {len(evenly)} of {count(len(samples))} samples; samples.jsonl has all"
    return f'<div class="prompt"><p class="note" dir="auto">{said}</p>{shown}</div>'


def _sample(sample: Sampled, losses: dict[int, float]) -> str:
    loss = f"validation {decimal(losses[sample.step])}" if sample.step in losses else ""
    prompt = f"<mark>{safe(sample.prompt)}</mark>" if sample.prompt else ""
    return (
        f'<div class="sample"><div class="when"><b>step {count(sample.step)}</b>{loss}</div>'
        f'<div class="text" dir="auto">{prompt}{safe(sample.text)}</div></div>'
    )


# Helpers


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return what a JSON file of one object holds; ``None`` where it is missing, or cannot be read, which is noted."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name}: is not one JSON object")
        return None
    return value


def _last(values: np.ndarray, otherwise: float) -> float:
    return values[-1] if len(values) else otherwise


def _last_step(metrics: Metrics) -> int:
    return max([int(_last(metrics.steps["step"], 0)), *(event.step for event in metrics.finished)])


def _seconds(metrics: Metrics) -> float:
    times = [float(_last(metrics.steps["seconds"], 0.0))]
    return max(times + [e.seconds for e in metrics.evaluations] + [e.seconds for e in metrics.finished])
