import html
import json
import re

import numpy as np
import pytest

from rung.report.figures import loss_charts, machine_charts, training_charts
from rung.report.metrics import MetricsLog, read_metrics
from rung.train.events import Hardware, Norms, Resumed, Spiked

TOKENS_PER_STEP = 4096


def data_of(figures):
    """Return what each chart with a title draws: its curves by name, as lists of (step, value)."""
    charts = {}
    for figure in re.findall(r'<figure class="chart">.*?</figure>', figures, re.DOTALL):
        title = re.search("<figcaption>(.*?) <span", figure)[1]
        data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure)[1])
        assert data["x"] == [0, 100 * TOKENS_PER_STEP]  # all charts of a run have one axis
        curves = {c["name"]: list(zip(c["steps"], c["values"], strict=True)) for c in data["curves"]}
        assert all(
            t == s * TOKENS_PER_STEP for c in data["curves"] for t, s in zip(c["tokens"], c["steps"], strict=True)
        )
        charts[html.unescape(title)] = curves
    return charts


def gpu(n, **changed):
    known = {"name": f"GPU<{n}>", "utilization": 90 + n, "memory_used": n << 30, "memory_total": 80 << 30}
    return {**known, "temperature": 60, "power": 300.5, "throttled": "", **changed}


@pytest.fixture
def run(tmp_path, make_step):
    """Return the metrics of a run of a hundred steps and these events."""

    def log_and_read(*events):
        with MetricsLog(tmp_path / "metrics.jsonl") as log:
            for step in range(1, 101):
                log(make_step(step, tokens=step * TOKENS_PER_STEP))
            for event in events:
                log(event)
        return read_metrics(tmp_path / "metrics.jsonl")

    return log_and_read


def test_norms_are_drawn_by_group_as_ratio_and_as_size(run):
    metrics = run(
        Norms(10, {"embedding": 4.0, "layers.mlp": 8.0}, {"embedding": 0.04, "layers.mlp": 0.0}),
        Norms(20, {"embedding": 5.0, "layers.mlp": 0.0}, {"embedding": 0.01, "layers.mlp": 0.1}),
        Norms(30, {"embedding": 5.0, "layers.mlp": 10.0}, {"embedding": 0.05, "layers.mlp": 0.1}),
    )
    charts = data_of(training_charts(metrics))
    assert charts["Update-to-weight ratio"] == {
        "embedding": [(10, 0.01), (20, 0.002), (30, 0.01)],
        "layers.mlp": [(30, 0.01)],  # none, and infinity, have no place on the axis
    }
    assert charts["Weight norm"]["layers.mlp"] == [(10, 8.0), (20, 0.0), (30, 10.0)]


def test_a_group_has_one_look_in_both_charts(run):
    figures = training_charts(run(Norms(10, {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "c": 1.0})))
    looks = re.findall(r'<span class="key (series-\d) line"><i></i>c</span>', figures)
    assert looks == ["series-2", "series-2"]


def test_without_norms_and_readings_there_are_no_charts_of_them(run):
    assert "Update-to-weight" not in training_charts(run())
    assert machine_charts(run()) == ""
    assert machine_charts(run(Hardware(1, 0.1, None, None, None, None, []))) == ""


def test_the_machine_is_drawn_as_far_as_it_is_known(run):
    metrics = run(
        Hardware(10, 1.0, 50.0, 250.0, 1 << 30, 8 << 30, [gpu(0), gpu(1)]),
        Hardware(20, 2.0, None, 150.0, 2 << 30, 8 << 30, [gpu(0, throttled="power limit"), gpu(1, utilization=None)]),
        Hardware(30, 3.0, 70.0, 150.0, 3 << 30, 8 << 30, [gpu(0)]),
    )
    figures = machine_charts(metrics)
    charts = data_of(figures)
    assert charts["Processor"] == {"all": [(10, 50.0), (30, 70.0)]}
    assert charts["Processor, this process"] == {"this": [(10, 2.5), (20, 1.5), (30, 1.5)]}
    assert charts["Memory"]["this process"] == [(10, 1.0), (20, 2.0), (30, 3.0)]
    assert charts["GPU use"] == {"GPU 0": [(10, 90), (20, 90), (30, 90)], "GPU 1": [(10, 91)]}
    assert charts["GPU memory"]["GPU 1"] == [(10, 1.0), (20, 1.0)]
    assert charts["GPU power"]["GPU 0"] == [(step, 300.5) for step in (10, 20, 30)]
    assert "3 readings. GPU 0 (GPU&lt;0&gt;) was held back in 1 of 3: power limit (1)." in figures
    assert "GPU 1 (" not in figures


def test_readings_that_a_resume_took_back_are_not_drawn_and_counted(run):
    readings = [Hardware(step, 1.0, float(n), None, None, None, []) for n, step in enumerate((10, 20, 30, 15, 25))]
    figures = machine_charts(run(*readings))
    assert data_of(figures)["Processor"] == {"all": [(10, 0.0), (15, 3.0), (25, 4.0)]}
    assert "5 readings. Not drawn, as a resume took their steps back: 2." in figures


def test_the_loss_has_marks_where_it_leapt_and_where_the_run_went_on(run):
    figures = loss_charts(run(Spiked(20, 9.0, 4.0), Resumed(50, [])))
    spike, resume = (
        float(re.search(rf'<path class="mark {kind}" d="M([\d.]+) ', figures)[1]) for kind in ("spike", "resume")
    )
    np.testing.assert_allclose([spike, resume], [200, 500], atol=0.1)
