"""``rung check``: what it prints of a step run again, and what it says where there is none."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from rung.diagnose.replay import DIVERGED, write_replay
from rung.model.weights import initialize
from rung.run.folder import Run


@pytest.fixture(scope="module")
def kept(trained, tmp_path_factory):
    """A run that kept step 3, with a weight that overflows, and step 5, which is sound."""
    run = Run(shutil.copytree(trained[0], tmp_path_factory.mktemp("kept") / "emma"))
    tokens = run.store.split("train").read(0, 4 * 33).reshape(4, 33)
    for step, factor in ((3, 1e38), (5, 1.0)):
        weights = initialize(run.model.weights(), 0)
        weights["layers"][0]["mlp"]["up"] = weights["layers"][0]["mlp"]["up"] * np.float32(factor)
        write_replay(
            run.path / DIVERGED,
            step=step,
            in_a_row=2,
            seed=42,
            micro_batch_size=0,
            documents=[0],
            findings=None,
            batch={"tokens": tokens[:, :-1], "targets": tokens[:, 1:]},
            weights=weights,
        )
    return run.path


def test_a_step_run_again_in_lines(rung, kept):
    done = rung("check", kept, "--replay", 3)
    assert done.status == 0, done.err
    first, now, rows, *others = done.text.splitlines()
    assert first == f"step 3 of {kept}, the last of 2 updates that were not finite"
    assert now.startswith("now:  again not finite: first not finite: ")
    assert "layers.0.mlp" in now
    assert "largest weight: layers.0.mlp.up" in now
    assert rows == "rows: none of the 4 rows of the batch has a finite loss"
    assert next(line for line in others if line.startswith("  row ")) == "  row 0: loss nan"
    assert any("Emma Woodhouse" in line for line in others)
    assert others[-1].startswith("note: the settings of the data now give another batch")


def test_the_newest_is_taken_wherever_the_flag_stands(rung, kept):
    for words in ((kept, "--replay"), ("--replay", kept), ("--replay", "5", kept)):
        done = rung("check", *words)
        assert done.text.startswith("step 5 of "), done.err
        assert "now:  finite here: all values are finite, the loss 5." in done.text


def test_the_same_as_json(rung, kept):
    result = rung("check", kept, "--replay", 3, "--json").json
    assert (result["step"], result["reproduced"], result["rows_not_finite"]) == (3, True, [0, 1, 2, 3])
    assert result["loss"] is None
    assert result["not_finite"]["loss"] == "nan"
    assert result["rows"][0]["finite"] is False
    assert rung("check", kept, "--replay", "--json").json["reproduced"] is False


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["{run}"], "nothing to check is named", "--replay"),
        ([], "missing RUN", "rung check --help"),
        (["{run}", "--replay", "4"], "has not kept step 4", "it has kept 3, 5"),
        (["{run}", "--replay=soon"], "--replay is 'soon', not a whole number", "--replay 100"),
        (["nowhere", "--replay"], "no run folder nowhere", ""),
        (["{trained}", "--replay"], "has kept no step to replay", "train.max_skipped"),
    ],
)
def test_mistakes_are_two_lines(rung, kept, trained, words, said, hint):
    done = rung("check", *(word.format(run=kept, trained=trained[0]) for word in words))
    assert (done.status, done.out) == (2, b"")
    problem, way_out = done.err.splitlines()
    assert said in problem
    assert way_out.startswith("hint: ")
    assert hint in way_out


def test_a_damaged_file_is_named(rung, kept, tmp_path):
    run = shutil.copytree(kept, tmp_path / "run")
    path = run / "diverged/5/weights.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    done = rung("check", run, "--replay")
    assert done.status == 2
    assert f"{path} is damaged" in done.err.splitlines()[0]
    assert rung("check", run, "--replay", "3").status == 0
