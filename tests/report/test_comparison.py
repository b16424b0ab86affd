"""Comparisons: what is said of runs side by side, and the page and picture of it."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest

from rung import config as settings
from rung.config import Config, override
from rung.report.comparison import Compared, Comparison, lines
from rung.report.comparison_page import SERIES, page, picture
from rung.report.html import Run
from rung.report.metrics import MetricsLog, read_metrics
from rung.train.events import Evaluated, Finished, StepDone


@pytest.fixture
def compared(tmp_path):
    """Make a run of a comparison, of so many steps; its numbers are known in advance."""

    def make(
        label, steps=200, *, changes=None, validate=True, loss=None, bits=True, tokenizer="t", held_out="h", **rest
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        with MetricsLog(path) as log:
            for step in range(1, steps + 1):
                value = loss(step) if loss else 5 - step / 100
                speed = 1.0 if step == 1 else 1000.0
                log(StepDone(step, step * 10, value, 1e-3, 0.5, speed, 1e9, 0.0, step / 4, False, 0.1))
                if validate and step % 50 == 0:
                    held = 3 + abs(step - 150) / 100
                    log(Evaluated(step, step * 10, held, math.exp(held), held / 2 if bits else None, 9, step / 4, True))
        run = Run(label, override(Config(), changes or {}), read_metrics(path), environment=rest.get("environment"))
        return Compared(label, f"runs/{label}", run, "done", 1234, tokenizer, held_out)

    return make


def test_the_facts_are_those_of_the_log(compared):
    facts = compared("a").facts
    assert (facts["steps"], facts["tokens"], facts["seconds"], facts["parameters"]) == (200, 2000, 50.0, 1234)
    assert facts["train_loss"] == pytest.approx(np.mean([5 - step / 100 for step in range(101, 201)]))
    assert (facts["best_validation_loss"], facts["best_step"], facts["bits_per_byte"]) == (3.0, 150, 1.5)
    assert facts["last_validation_loss"] == 3.5
    assert facts["tokens_per_second"] == 1000.0  # not the first step's, which waits for the compiler


def test_a_run_of_nothing_has_no_scores(compared):
    facts = compared("a", 0).facts
    assert (facts["steps"], facts["tokens"], facts["seconds"]) == (0, 0, 0.0)
    assert [facts[name] for name in ("train_loss", "best_validation_loss", "tokens_per_second")] == [None] * 3
    assert compared("a", 0).curves == {}


def test_settings_that_differ_are_all_that_do_and_names_do_not_count(compared):
    one = compared("a", changes={"name": "x", "train.seed": 1, "sample.prompts": ("a", "b")})
    two = compared("b", changes={"name": "y", "train.learning_rate": 0.5})
    differences = Comparison([one, two]).differences
    assert differences == {
        "train.seed": [1, 42],
        "train.learning_rate": [1e-3, 0.5],
        "sample.prompts": [("a", "b"), ("",)],
    }
    assert differences.keys() == settings.differences(one.run.config, two.run.config).keys() - {"name"}


def test_versions_and_devices_that_differ_are_named(compared):
    one, two = compared("a", environment={"jax": "1", "device": "x"}), compared("b", environment={"jax": "1"})
    assert Comparison([one, two]).surroundings == {"device": ["x", None]}


def test_losses_of_different_tokenizers_do_not_compare(compared):
    same, other = [compared("a"), compared("b")], [compared("a"), compared("b", tokenizer="u", loss=lambda step: 1.0)]
    assert Comparison(same).losses_compare
    assert Comparison(same).notes == []
    comparison = Comparison(other)
    assert not comparison.losses_compare
    assert "losses do not compare" in comparison.notes[0]
    assert comparison.winner("best_validation_loss") is None
    assert "each of its own tokenizer" in page(comparison)


def test_scores_on_different_texts_do_not_compare(compared):
    assert "held out differ" in Comparison([compared("a"), compared("b", held_out="i")]).notes[0]
    assert "not known" in Comparison([compared("a"), compared("b", held_out=None)]).notes[0]
    # A run that was never validated has no score to compare.
    assert Comparison([compared("a"), compared("b", held_out="i", validate=False)]).notes == []


def test_the_lowest_score_wins_unless_all_are_alike(compared):
    one, two = compared("a", 140), compared("b", 200)
    assert Comparison([one, two]).winner("bits_per_byte") == 1
    assert Comparison([two, two]).winner("bits_per_byte") is None
    assert Comparison([two, compared("c", 10)]).winner("bits_per_byte") is None


def test_the_terminal_has_a_line_for_each_run_and_its_settings(compared):
    text = lines(Comparison([compared("one"), compared("two", 50, changes={"train.seed": 7})]))
    assert text[0].split()[:5] == ["run", "state", "steps", "tokens", "parameters"]
    assert text[1].split()[:5] == ["one", "done", "200", "2K", "1.23K"]
    assert text[2].split()[0] == "two"
    assert ["train.seed", "42", "7"] in [line.split() for line in text]
    many = [compared(str(n), 10, changes={"train.seed": n}) for n in range(6)]
    assert "settings that differ: train.seed" in lines(Comparison(many))


class Page(HTMLParser):
    """Checks that elements nest, and collects what matters."""

    VOID = ("meta", "input", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.inputs, self.labels, self.figures, self.text = [], [], [], 0, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in (*self.VOID, "path"):
            self.open.append(tag)
        if tag == "input":
            self.inputs.append(attrs)
        if tag == "label":
            self.labels.append(attrs["for"])
        self.figures += tag == "figure"

    def handle_endtag(self, tag):
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def test_the_page_has_every_chart_by_each_axis_and_one_chosen(compared):
    parsed = Page(page(Comparison([compared("a"), compared("b", 100)])))
    assert parsed.labels == ["across-tokens", "across-steps", "across-seconds"]
    assert [one["id"] for one in parsed.inputs] == parsed.labels
    assert ["checked" in one for one in parsed.inputs] == [True, False, False]
    assert parsed.figures == 9  # three quantities
    assert Page(page(Comparison([compared("a", validate=False), compared("b", validate=False)]))).figures == 3
    assert Page(page(Comparison([compared("a", bits=False), compared("b", bits=False)]))).figures == 6


def test_the_page_needs_nothing_from_elsewhere_and_no_name_breaks_it(compared, nasty):
    text = page(Comparison([compared(nasty), compared("b")])).encode("utf-8", errors="backslashreplace").decode()
    Page(text)
    assert "http" not in re.sub(r'http-equiv="[^"]+"', "", text)
    assert "<script>alert" not in text
    assert "\x1b" not in text


def test_the_data_of_the_charts_is_that_of_the_runs(compared):
    text = page(Comparison([compared("a", loss=lambda step: math.nan if step > 100 else 2.0), compared("b", 50)]))
    data = [json.loads(one) for one in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    by_steps = next(one for one in data if one["across"] == "steps")
    assert [curve["name"] for curve in by_steps["curves"]] == ["a", "b"]
    assert set(by_steps["curves"][0]["values"]) == {2.0}
    assert by_steps["curves"][0]["steps"][-1] <= 102  # smoothed over a neighbour or two
    assert by_steps["x"] == [0, by_steps["curves"][0]["steps"][-1]]


def read_picture(path):
    from matplotlib.image import imread

    return imread(path)[..., :3]


def holds(image, colour):
    """Return whether a picture has points of a colour."""
    from matplotlib.colors import to_rgb

    return bool((np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.02).any())


def test_the_picture_has_each_runs_colour_and_a_row_for_each_quantity(compared, tmp_path):
    picture(Comparison([compared("a"), compared("b", 100)]), tmp_path / "three.png")
    picture(Comparison([compared("a", validate=False), compared("$b_{", 1, validate=False)]), tmp_path / "one.png")
    three, one = read_picture(tmp_path / "three.png"), read_picture(tmp_path / "one.png")
    assert three.shape[1] == one.shape[1]
    assert three.shape[0] > 2 * one.shape[0]
    assert [holds(three, colour) for colour in SERIES[:3]] == [True, True, False]


def test_the_picture_has_the_colours_of_the_page():
    style = resources.files("rung.report").joinpath("page.css").read_text(encoding="utf-8")
    by_daylight = style[: style.index("@media")]
    assert tuple(re.findall(r"--series-\d: (#\w+);", by_daylight)) == SERIES


@pytest.mark.parametrize("odd", [
    {"steps": 0},
    {"steps": 1},
    {"steps": 1, "validate": False},
    {"loss": lambda step: math.nan},
    {"loss": lambda step: math.inf if step % 2 else 1.0},
])  # fmt: skip
def test_odd_runs_are_compared_all_the_same(odd, compared, tmp_path):
    for comparison in (Comparison([compared("a"), compared("b", **odd)]), Comparison([compared("c", **odd)] * 2)):
        Page(page(comparison))
        picture(comparison, tmp_path / "p.png")
        assert len(lines(comparison)) >= 3


def test_the_end_of_a_run_counts_where_its_last_steps_are_not_in_the_log(compared):
    run = compared("a", 10)
    run.run.metrics.events.append(Finished(15, 150, 99.0, "done"))
    assert (run.facts["steps"], run.facts["tokens"], run.facts["seconds"]) == (15, 150, 99.0)
