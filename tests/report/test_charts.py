import json
import re
from importlib import resources

import numpy as np
import pytest

from rung.report.charts import HEIGHT, WIDTH, Curve, Mark, chart, labels


def curve(values, **looks):
    n = len(values)
    return Curve("train", np.arange(1, n + 1) * 100, np.arange(1, n + 1), np.array(values, np.float64), **looks)


def drawn(html, kind):
    """Return the points of the path of a class."""
    path = re.search(rf'<path class="{kind}" d="M([^"]*)"', html)[1]
    return [tuple(map(float, point.split())) for point in path.split("L")]


def test_points_lie_where_the_axes_say():
    html = chart("Loss", "nats", [curve([3.0, 1.0, 2.0])])
    points = drawn(html, "plain line")
    assert [x for x, _ in points] == [round(WIDTH * part, 1) for part in (1 / 3, 2 / 3, 1)]
    (_, top), (_, bottom), (_, middle) = points
    assert 0 < top < bottom < HEIGHT
    assert abs(middle - (top + bottom) / 2) <= 0.1
    # The tick's label and the curve agree: the value 2 is drawn at the height of the label "2".
    place = float(re.search(r'top:([\d.]+)%">2<', html)[1])
    assert abs(place / 100 * HEIGHT - middle) < 0.2


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances():
    html = chart("Loss", "nats", [curve([8.0, 4.0, 2.0, 1.0])])
    heights = [y for _, y in drawn(html, "plain line")]
    np.testing.assert_allclose(np.diff(heights), np.diff(heights)[0], atol=0.2)
    assert "log scale" in html


def test_values_under_the_pointer_are_the_curves_own():
    html = chart("Loss", "", [curve([3.0, np.nan, 2.0])])
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])
    assert data["curves"] == [
        {"name": "train", "tone": "plain", "tokens": [100, 300], "steps": [1, 3], "values": [3.0, 2.0]}
    ]


def test_what_lies_across_is_what_was_asked():
    run = curve([3.0, 2.0, 1.0])
    timed = Curve("train", run.tokens, run.steps, run.values, seconds=np.array([0.0, 3600.0, 7200.0]))
    for across, title, places in [
        ("steps", "steps", [1 / 3, 2 / 3, 1]),
        ("seconds", "hours of training", [0, 0.5, 1]),
    ]:
        html = chart("Loss", "", [timed], across=across)
        assert [x for x, _ in drawn(html, "plain line")] == [round(WIDTH * part, 1) for part in places]
        assert f'<div class="x-title">{title}</div>' in html
        data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])
        assert data["across"] == across
        assert len(data["curves"][0][across]) == 3
    # Two hours: the label "2" stands at the right end.
    assert '<span style="left:100.00%">2</span>' in chart("Loss", "", [timed], across="seconds")


def test_a_logarithmic_axis_that_is_asked_for_leaves_out_what_has_no_place_on_it():
    html = chart("Ratio", "", [curve([1e-3, 0.0, -1.0, 2e-3])], log=True)
    assert "log scale" in html
    assert len(drawn(html, "plain line")) == 2
    assert "log scale" in chart("Ratio", "", [curve([1e-3])], log=True)
    assert "Nothing was recorded" in chart("Ratio", "", [curve([0.0])], log=True)


def test_no_two_of_two_dozen_curves_look_alike():
    looks = [curve([1.0]).one_of_many(n) for n in range(24)]
    assert len({(look.tone, look.dash) for look in looks}) == 24
    css = resources.files("rung.report").joinpath("page.css").read_text()
    for look in looks:
        assert f".{look.tone} {{ --tone: var(--{look.tone}); }}" in css
        assert css.count(f"--{look.tone}: #") == 2  # by day and by night
        assert not look.dash or f"path.dash-{look.dash} " in css


def test_marks_of_each_kind_are_drawn_and_explained():
    marks = [Mark(100, "left out", "skip"), Mark(200, "leapt", "spike"), Mark(300, "went on", "resume")]
    html = chart("Loss", "", [curve([3.0, 2.0, 1.0])], marks)
    for mark, words in zip(marks, ("skipped update", "loss spike", "resumed"), strict=True):
        path = re.search(rf'<path class="mark {mark.kind}" d="M([\d.]+) [^"]*"><title>{mark.text}</title>', html)
        assert float(path[1]) == pytest.approx(mark.tokens / 300 * WIDTH, abs=0.1)
        assert words in html
    assert "resumed" not in chart("Loss", "", [curve([3.0])], marks[:1])


def test_a_chart_says_in_words_where_its_curves_end():
    assert 'aria-label="Loss; train ends at 1.5"' in chart("Loss", "", [curve([3.0, 1.5])])


def test_a_name_cannot_end_the_data():
    html = chart("</script>", "<b>", [Curve("</script><script>", *(np.ones(1, np.int64),) * 3)], [Mark(1, "</title>")])
    assert html.count("<script") == html.count("</script>") == 1
    assert "<b>" not in html


def test_one_point_is_a_dot_and_none_is_said():
    assert 'class="dot plain"' in chart("Loss", "", [curve([3.0])])
    assert "Nothing was recorded" in chart("Loss", "", [curve([])])
    assert "Nothing was recorded" in chart("Loss", "", [curve([np.nan, np.inf])])


def test_labels_of_one_axis_are_in_one_notation():
    assert labels([0, 0.0002, 0.001]) == ["0", "2e−4", "1e−3"]
    assert labels([0, 2000]) == ["0", "2,000"]
    assert labels([0, 20_000]) == ["0", "20K"]
    assert labels([1e-4, 1e-2, 1]) == ["1e−4", "1e−2", "1e0"]
    assert labels([-0.5, 0.0, 0.30000000000000004]) == ["−0.5", "0", "0.3"]
