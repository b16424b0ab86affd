import subprocess
import sys

import numpy as np
import pytest

from rung.report.metrics import read_metrics
from rung.report.plots import TRAIN, VALIDATION, loss_curves


def pixels(path):
    from matplotlib.image import imread

    return np.round(imread(path)[..., :3] * 255).astype(int)


def near(image, colour):
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(image - wanted).max(axis=-1) < 12).sum()


@pytest.mark.parametrize("steps", [200, 1])
def test_the_picture_has_its_size_and_both_curves(write_run, steps):
    run = write_run(steps)
    loss_curves(read_metrics(run / "metrics.jsonl"), run / "loss.png")
    image = pixels(run / "loss.png")
    assert image.shape == (900, 1600, 3)
    assert near(image, VALIDATION) > 50
    assert near(image, TRAIN) > (1000 if steps > 1 else 0)


def test_a_run_without_validation_has_only_the_training_curve(write_run):
    run = write_run(50, validate=False)
    loss_curves(read_metrics(run / "metrics.jsonl"), run / "loss.png")
    image = pixels(run / "loss.png")
    assert near(image, TRAIN) > 1000
    assert near(image, VALIDATION) == 0


def test_nothing_logged_is_still_a_picture(tmp_path):
    loss_curves(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "loss.png")
    assert pixels(tmp_path / "loss.png").shape == (900, 1600, 3)


@pytest.mark.parametrize("name", ["novel", "国 $x_$ \udc80\x00", "a b" * 500])
def test_the_title_names_the_run(write_run, recwarn, name):
    run = write_run(5)
    metrics = read_metrics(run / "metrics.jsonl")
    loss_curves(metrics, run / "without.png")
    loss_curves(metrics, run / "loss.png", name)
    assert pixels(run / "loss.png").shape == (900, 1600, 3)
    assert (run / "loss.png").read_bytes() != (run / "without.png").read_bytes()
    assert not recwarn.list


def test_no_global_state_and_no_early_import(tmp_path):
    program = (
        "import sys, rung.report.plots, rung.report.html, rung.report.progress, rung.report.metrics;"
        "assert not {'matplotlib', 'rich', 'jax'} & set(sys.modules), sorted(sys.modules);"
        "from pathlib import Path;"
        "rung.report.plots.loss_curves(rung.report.metrics.read_metrics('none'), Path(sys.argv[1]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "loss.png")], check=True)
