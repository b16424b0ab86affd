"""Comparing runs: which are found, what is written, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rung.errors import RungError
from rung.run.compare import compare


@pytest.fixture(scope="session")
def two(train_tiny, tmp_path_factory):
    """A folder of two runs that differ; only to be read."""
    folder = tmp_path_factory.mktemp("two") / "runs"
    train_tiny(folder / "short", {"train.steps": 6})
    train_tiny(folder / "chars", {"tokenizer.kind": "char"})
    return folder


@pytest.fixture
def here(two, tmp_path, monkeypatch):
    """A place with these runs in runs/, to write in."""
    shutil.copytree(two, tmp_path / "runs", ignore=shutil.ignore_patterns("checkpoints"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_comparison_is_a_page_a_picture_and_numbers(here):
    said = []
    result = compare(["short", "runs/chars"], say=said.append)
    assert said == []
    assert sorted(path.name for path in (here / "comparison").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.png",
    ]
    assert [one["steps"] for one in result["runs"]] == [6, 12]
    assert result["differences"]["train.steps"] == [6, 12]
    assert not result["losses_compare"]
    assert "losses do not compare" in result["notes"][0]
    assert len(result["notes"]) == 1  # the same text is held out, whatever its tokens
    written = json.loads((here / "comparison/comparison.json").read_text(encoding="ascii"))
    assert written["runs"] == result["runs"]
    curve = written["curves"]["short"]
    assert curve["train_loss"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert curve["validation_loss"]["values"][-1] == result["runs"][0]["last_validation_loss"]
    assert curve["bits_per_byte"]["tokens"][-1] == result["runs"][0]["tokens"]


def test_the_numbers_are_those_of_the_runs_own_results(undisturbed, two, tmp_path):
    result = compare([undisturbed["run"], two / "short"], tmp_path / "out", say=lambda text: None)
    facts = result["runs"][0]
    for name in ("steps", "tokens", "parameters", "bits_per_byte"):
        assert facts[name] == undisturbed[name]
    assert facts["train_loss"] == pytest.approx(undisturbed["train_loss"], rel=1e-12)
    assert facts["last_validation_loss"] == undisturbed["validation_loss"]


def test_runs_of_one_name_are_told_apart(two, undisturbed, tmp_path):
    for parent in ("a", "b"):
        shutil.copytree(two / "short", tmp_path / parent / "run")
    result = compare([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "out")
    assert [one["label"] for one in result["runs"]] == ["a/run", "b/run"]
    assert result["differences"] == {}


def test_what_a_glob_brings_besides_runs_is_left_out_and_said(here):
    (here / "runs/notes.txt").touch()
    (here / "runs/empty").mkdir()
    said = []
    result = compare([*sorted(str(path) for path in Path("runs").iterdir()), "chars"], say=said.append)
    assert [one["label"] for one in result["runs"]] == ["chars", "short"]
    assert len(said) == 3
    assert "runs/notes.txt" in "".join(said)
    assert "named already" in said[-1]


def test_a_missing_run_is_refused_with_the_nearest(here):
    with pytest.raises(RungError, match="no run folder runs/shorts") as caught:
        compare(["chars", "shorts"])
    assert "runs/short?" in caught.value.hint
    with pytest.raises(RungError, match="one run to compare"):
        compare(["chars"])
    with pytest.raises(RungError, match="one run to compare"):
        compare(["chars", "runs/chars"], say=lambda text: None)
    assert not (here / "comparison").exists()


def test_a_comparison_is_replaced_and_nothing_else_is(here):
    compare(["chars", "short"], "out")
    compare(["short", "chars"], "out")
    assert json.loads((here / "out/comparison.json").read_text())["runs"][0]["label"] == "short"
    (here / "taken").mkdir()
    (here / "taken/thesis.txt").touch()
    with pytest.raises(RungError, match="taken has files in it"):
        compare(["chars", "short"], "taken")
    with pytest.raises(RungError, match="is no folder"):
        compare(["chars", "short"], here / "taken/thesis.txt")


def test_a_run_whose_tokens_are_gone_is_compared_all_the_same(here):
    shutil.rmtree(here / "runs/short/tokens")
    for name in ("metrics.jsonl", "data.json", "environment.json", "model.safetensors"):
        (here / "runs/short" / name).unlink()
    result = compare(["chars", "short"], "out")
    assert result["runs"][1]["steps"] == 0
    assert result["runs"][1]["state"] == "untrained"


def test_a_damaged_config_is_refused_by_its_name(here):
    (here / "runs/short/config.toml").write_text("[")
    with pytest.raises(RungError, match=r"short/config.toml is not TOML"):
        compare(["chars", "short"], "out")


def test_the_verb_is_in_the_python_api_and_its_module_does_not_take_its_place(here):
    import rung.run.compare

    assert rung.compare is compare
    assert rung.runs(".") == []
    assert rung.run.compare.compare is compare
    assert [state.state for state in rung.runs("runs")] == ["done", "done"]
