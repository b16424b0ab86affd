import json
import math

import numpy as np
import pytest

from rung import config
from rung.report.metrics import MetricsLog
from rung.train.events import Evaluated, Finished, Note, Sampled, Saved, Skipped, StepDone

TOKENS_PER_STEP = 4096
NASTY = "<script>alert('x')</script> & \"quoted\" \x1b[31m\x00\x9b\r ]]> --> 国境の長いトンネル \u202eمرحبا \udc80"


def step_done(step, loss=3.0, skipped=False, **rest):
    values = {
        "tokens": step * TOKENS_PER_STEP,
        "loss": loss,
        "learning_rate": 1e-3 / step,
        "gradient_norm": math.inf if skipped else 0.5,
        "tokens_per_second": 40_000.0,
        "flops_per_second": 4e10,
        "data_wait": 0.0005,
        "seconds": 0.1 * step,
        "skipped": skipped,
        "epoch": step / 100,
    }
    return StepDone(step, **(values | rest))


@pytest.fixture
def make_step():
    return step_done


@pytest.fixture
def nasty():
    return NASTY


@pytest.fixture
def write_run(tmp_path):
    """Write a run folder of so many steps, with skipped ones and validations where asked."""

    def write(steps, *, validate=True, samples=(NASTY,), name="a-run", skip=()):
        for old in tmp_path.iterdir():
            old.unlink()
        settings = config.resolve(config.override(config.Config(), {"name": name, "model.d_model": 128}))
        (tmp_path / "config.toml").write_text(config.to_toml(settings), encoding="utf-8")
        (tmp_path / "environment.json").write_text(json.dumps({"jax": "0.10.2", "device": {"kind": "cpu", "count": 2}}))
        noise = np.random.default_rng(0).normal(size=steps + 1)
        with MetricsLog(tmp_path / "metrics.jsonl") as log:
            for step in range(1, steps + 1):
                loss = 2 + 6 * math.exp(-step / 20) + 0.1 * noise[step]
                log(step_done(step, math.nan if step in skip else loss, skipped=step in skip))
                if step in skip:
                    log(Skipped(step, 1, "the gradient is not finite", [3, 7], "the gradient of head.weight"))
                if validate and step % max(1, steps // 5) == 0:
                    log(Evaluated(step, step * TOKENS_PER_STEP, loss, math.exp(loss), loss / 2, 1000, step / 10, True))
                    for text in samples:
                        log(Sampled(step, "Once <upon> & ", text))
                    log(Saved(step, f"checkpoints/{step}"))
            if steps:
                log(Note(steps, "stopping: <time> is up"))
                log(Finished(steps, steps * TOKENS_PER_STEP, steps / 10, "all steps done"))
        return tmp_path

    return write
