import json
import re

import numpy as np

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
    assert labels([-0.5, 0.0, 0.30000000000000004]) == ["−0.5", "0", "0.3"]
