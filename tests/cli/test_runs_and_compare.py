"""``rung runs`` and ``rung compare``, as a person and a script call them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def two(trained, here):
    """Two runs in runs/, alike but for a name."""
    for name in ("one", "two"):
        shutil.copytree(trained[0], here / "runs" / name)
    return here


def test_runs_are_a_table_and_json(rung, two):
    done = rung("runs")
    assert done.status == 0, done.err
    head, *rows = done.text.splitlines()
    assert head.split()[:3] == ["run", "state", "steps"]
    assert sorted(row.split()[0] for row in rows) == ["runs/one", "runs/two"]
    assert all("6/6" in row and "done" in row for row in rows)
    states = rung("runs", "--json").json["runs"]
    assert {state["state"] for state in states} == {"done"}
    assert {"steps", "total_steps", "validation_loss", "bits_per_byte", "parent", "active"} <= states[0].keys()


def test_a_damaged_run_is_in_the_table_and_its_reason_below(rung, two):
    (two / "runs/one/config.toml").write_text("[")
    done = rung("runs")
    assert done.status == 0
    assert "damaged" in done.text
    assert done.text.splitlines()[-1].startswith("runs/one: ")
    assert "Traceback" not in done.err


def test_no_runs_are_said_and_a_missing_folder_is_a_mistake(rung, here):
    assert "no runs in runs" in rung("runs").text
    assert rung("runs", "--json").json == {"runs": []}
    done = rung("runs", "elsewhere")
    assert done.status == 2
    assert "elsewhere" in done.err


def test_compare_prints_a_table_and_where_the_page_is(rung, two):
    done = rung("compare", "one", "two")
    assert done.status == 0, done.err
    assert done.text.splitlines()[1].split()[:3] == ["one", "done", "6"]
    assert "no setting differs" in done.text
    assert Path("comparison/comparison.html").exists()
    assert "comparison/comparison.html" in done.text
    result = rung("compare", "one", "two", "--out", "other", "--json").json
    assert result["png"] == "other/comparison.png"
    assert json.loads(Path(result["json"]).read_text())["runs"] == result["runs"]


def test_compare_with_one_run_is_a_mistake(rung, two):
    done = rung("compare", "one")
    assert done.status == 2
    assert "hint: name two runs" in done.err
