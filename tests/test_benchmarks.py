"""The benchmarks: both sides train the same model, rounds under load do not count, tables say what was measured."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rung import config as settings
from rung.model import Decoder
from rung.model.weights import parameter_count

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a program of the benchmarks, as Python does that runs it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


# What is compared


def our_parameters(speed, name: str) -> int:
    flags = (word.removeprefix("--").split("=") for word in speed.SHAPES[name].ours() if "=" in word)
    changes = {path.replace("-", "_"): value for path, value in flags}
    kinds = {path: settings.field_type(settings.Config, path) for path in changes}
    typed = {
        path: value == "true" if kinds[path] is bool else kinds[path](value) if kinds[path] in (int, float) else value
        for path, value in changes.items()
    }
    config = settings.resolve(settings.override(settings.Config(), typed))
    return parameter_count(Decoder(config.model).weights())


@pytest.mark.parity
@pytest.mark.parametrize("name", ["a", "b", "c", "c8", "c64", "d"])
def test_both_sides_have_the_same_parameters(load, name):
    import torch

    speed, peer = load("speed"), load("peer_torch")
    args = peer.parse(speed.SHAPES[name].peer()[2:])
    with torch.device("meta"):
        theirs = sum(weight.numel() for weight in peer.GPT(args).parameters())
    assert our_parameters(speed, name) == theirs


@pytest.mark.parity
def test_the_second_peer_is_gpt2_small(load):
    import torch

    speed, peer = load("speed"), load("peer_torch")
    with torch.device("meta"):
        model = peer.Gpt2(peer.parse(speed.SHAPES["d"].peer("--transformers")[2:]))
    assert sum(weight.numel() for weight in model.parameters()) == our_parameters(speed, "d") == 124_439_808


def test_our_side_trains_on_random_tokens(load):
    ours = load("ours").on_random_tokens(
        2000,
        None,
        {
            "model.vocab_size": 50,
            "model.context_length": 16,
            "model.n_layers": 1,
            "model.d_model": 16,
            "model.n_heads": 2,
            "train.batch_size": 4,
        },
    )
    assert ours.train(2) > 0
    assert ours.progress.step == 2
    assert ours.progress.tokens == 2 * 4 * 16
    assert ours.loss == pytest.approx(math.log(50), abs=0.1)  # of tokens that nothing can be known of


# Turns


class Turns:
    """A program whose turns have loads and seconds of a list."""

    def __init__(self, name: str, log: list[str], loads: list[float], seconds: float):
        self.name, self.log, self.loads, self.seconds = name, log, iter(loads), seconds

    def turn(self, line: str) -> dict:
        self.log.append(self.name)
        answer = {"tokens": 100 * int(line.split()[1]), "seconds": self.seconds, "outside_load": next(self.loads)}
        return answer | ({"flops_per_token": 7.0} if self.name == "ours" else {})


@pytest.fixture
def still(load, monkeypatch):
    """The benchmark of speed on a machine whose own speed is known."""
    speed = load("speed")
    monkeypatch.setattr(speed, "matrix_flops", lambda: 1400.0)
    monkeypatch.setattr(speed, "memory_bytes_per_second", lambda: 5.0)
    monkeypatch.setattr(speed, "warn", lambda text: None)
    return speed


def test_a_round_counts_only_if_nobody_else_worked_in_any_of_its_turns(still):
    log: list[str] = []
    ours = Turns("ours", log, [0.0, 0.01, 0.5, 0.0], 1.0)
    torch = Turns("torch", log, [0.2, 0.0, 0.0, 0.02], 2.0)
    kept, dropped = still.in_turns({"ours": ours, "torch": torch}, rounds=2, steps=3, tries=3)
    assert [turn["outside_load"] for turn in kept] == [0.01, 0.02]
    assert dropped == 2
    assert log == ["ours", "torch", "torch", "ours"] * 2  # neither is always the first
    summary = still.summarize(kept)
    assert summary["tokens_per_second"] == {"ours": 300.0, "torch": 150.0}
    assert summary["ratio"]["torch"] == {"median": 2.0, "lowest": 2.0, "highest": 2.0}
    assert summary["mfu"]["ours"]["median"] == 300 * 7 / 1400
    assert summary["outside_load"] == 0.02


def test_where_it_is_never_quiet_the_least_loaded_rounds_stand_with_their_load(still):
    loads = [0.5, 0.2, 0.4, 0.0]
    programs = {name: Turns(name, [], loads, 1.0) for name in ("ours", "torch")}
    kept, dropped = still.in_turns(programs, rounds=2, steps=1, tries=2)
    assert [turn["outside_load"] for turn in kept] == [0.0, 0.2]
    assert dropped == 3


def test_the_load_of_others_is_told_from_a_programs_own(load, monkeypatch):
    burn = "import time; n = time.process_time()\nwhile time.process_time() < n + 0.4: pass\n"
    serve = f"import sys\nfor line in sys.stdin:\n  exec({burn!r}); print('{{}}', flush=True)"
    turns = load("turns")
    program = turns.Program([sys.executable, "-c", serve])
    before = program.processor_seconds()
    with monkeypatch.context() as patch:
        patch.setattr(turns, "busy_seconds", program.processor_seconds)  # as if nobody else did anything here
        alone = program.turn("go")["outside_load"]
    assert 0.35 <= program.processor_seconds() - before <= 0.6
    others = [subprocess.Popen([sys.executable, "-c", burn * 5]) for _ in range(2)]
    beside = program.turn("go")["outside_load"]
    program.close()
    for other in others:
        other.kill()
        other.wait()
    assert beside * os.cpu_count() > 0.4  # processors
    assert alone * os.cpu_count() < 0.1


def test_a_program_that_ends_is_an_error_that_says_so(load):
    program = load("turns").Program([sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(RuntimeError, match="status 7"):
        program.ask("go 1")


# What is written


def entry(speed, date: str, names: str, rate: float, processor: str = "one") -> dict:
    rounds = [
        {"ours": rate, "torch": 100.0, "flops_per_token": 1.0, "matrix_flops": 400.0, "memory_bytes": 1.0}
        | {"outside_load": load}
        for load in (0.0, 0.01)
    ]
    shape = {
        "title": "shape",
        **speed.summarize(rounds),
        "peer": "compiled",
        "compile_seconds": {"ours": 1.0, "torch": 30.0},
        "peak_bytes": {"ours": 2e6, "torch": 3e6},
        "steps_a_turn": 4,
        "rounds": rounds,
        "rounds_under_load": 1,
    }
    return {
        "date": date,
        "commit": "abcdef",
        "machine": {"processor": processor, "flags": ["avx2"], "cores": 2, "python": "3.11"},
        "versions": {"jax": "1", "torch": "2"},
        "shapes": dict.fromkeys(names, shape),
    }


def test_the_table_has_the_last_measurement_of_each_shape_on_this_machine(load, tmp_path, monkeypatch):
    speed = load("speed")
    history, readme, plot = tmp_path / "speed.jsonl", tmp_path / "README.md", tmp_path / "speed.png"
    for name, path in (("HISTORY", history), ("README", readme), ("PLOT", plot)):
        monkeypatch.setattr(speed, name, path)
    entries = [
        entry(speed, "2030-01-01 10:00", "ab", 110.0),
        entry(speed, "2030-01-02 10:00", "abcd", 900.0, processor="other"),
        entry(speed, "2030-01-03 10:00", "a", 120.0),
    ]
    history.write_text("".join(json.dumps(one) + "\n" for one in entries))
    readme.write_text(f"above\n{speed.BEGIN}\nold\n{speed.END}\nbelow\n")
    speed.write(speed.history())
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert [row.split("|")[2].strip() for row in rows] == ["120", "110"]
    assert [row.split("|")[4].strip() for row in rows] == ["1.20 (1.20 to 1.20)", "1.10 (1.10 to 1.10)"]
    assert "2030-01-03" in text
    assert "2030-01-02" not in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_measurement_under_load_is_marked(load):
    speed = load("speed")
    one = entry(speed, "2030-01-01 10:00", "a", 110.0)
    assert "under load" not in speed.table([one])
    one["shapes"]["a"]["outside_load"] = 0.4
    assert "under load: 40% by others" in speed.table([one])


# On a GPU


@pytest.mark.slow
def test_the_script_for_a_gpu_works_on_a_cpu_with_a_tiny_model():
    done = subprocess.run(
        ["sh", BENCHMARKS / "gpu.sh", "--try"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cudnn, blocked = (line for line in done.stdout.splitlines() if line.startswith("| gpt2-small |"))
    assert re.search(r"\| cudnn \| 2 \| compute.attention cudnn cannot be used: it is for NVIDIA GPUs", cudnn)
    assert re.search(r"\| blocked \| 2 \| [\d,]+ \([\d,]+ to [\d,]+\) \| [\d.,]+ \| [\d.]+% \| \d+ s \|", blocked)
    assert "compute in bfloat16" in done.stdout


def test_a_point_without_time_left_and_one_without_an_answer_are_rows(load):
    gpu = load("gpu")
    late = gpu.measure("gpt2-small", "cudnn", 8, 1.0, ())
    odd = gpu.measure("no-such-preset", "cudnn", 8, 60.0, ())
    text = gpu.page([("gpt2-small", "cudnn", 8, late), ("gpt2-small-untied", "blocked", 8, odd)])
    rows = [line for line in text.splitlines() if line.startswith("| gpt2")]
    assert "the time was over" in rows[0]
    assert "unknown preset 'no-such-preset'" in rows[1]


# Optimizers


def test_steps_to_a_goal_lie_on_a_line_over_the_logarithm(load):
    steps_to = load("optimizers").steps_to
    # Loss falls by 1 with each doubling.
    ends = [(100, 5.0), (200, 4.0), (800, 2.0)]
    assert [steps_to(goal, ends) for goal in (5.0, 4.0, 3.0)] == pytest.approx([100, 200, 400])
    assert steps_to(1.9, ends) is None  # not reached
    assert steps_to(5.1, ends) is None  # before the shortest: not known


def test_the_best_settings_are_of_every_optimizer_and_are_settings(load):
    optimizers = load("optimizers")
    from rung.train.optimizer import GROUPS

    for task, best in optimizers.BEST.items():
        assert set(best) == set(GROUPS)
        for given in best.values():
            changes = {f"train.{name}": value for name, value in given.items()}
            settings.override(settings.preset(optimizers.TASKS[task].preset), changes)
