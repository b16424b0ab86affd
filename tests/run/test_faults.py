"""Disks that are full or read-only, folders that vanish, saves cut short: nothing whole is lost, and it is said.

Things happen at a step: a listener of the run in this process fills the disk, or takes the folder away. What is killed
is killed in processes of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run.same import same_state, same_weights, told
from rung import config as settings
from rung.cli import main
from rung.report.metrics import MetricsLog, read_metrics
from rung.run.resuming import resume
from rung.train import loop
from rung.train.events import Saved, SaveFailed, StepDone

FULL = "No space left on device"
SOURCE = Path(__file__).parents[2] / "src"


class Disk:
    """A small file system of its own, in memory."""

    def __init__(self, path: Path, size: str):
        self.path = path
        path.mkdir()
        if shutil.which("mount") is None:
            pytest.skip("no mount here, so no small disk")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "rung-test", path], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no small disk, since mounting one is not allowed: {done.stderr.strip()}")

    @property
    def room(self) -> int:
        """Bytes that it still takes."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Fill it up to ``leave`` bytes."""
        with contextlib.suppress(OSError), open(self.path / "ballast", "ab", buffering=0) as file:
            while self.room > leave:
                file.write(bytes(min(65536, self.room - leave)))

    def free(self) -> None:
        """Make the room again."""
        (self.path / "ballast").unlink(missing_ok=True)

    def mode(self, mode: str) -> None:
        """Mount it anew, ``ro`` or ``rw``."""
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)

    def remove(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk", "6m")
    yield disk
    disk.remove()


@pytest.fixture
def at(monkeypatch) -> Callable[..., None]:
    """Let things happen once, when the log has heard of an event: ``at({5: do, SaveFailed: do, (Saved, 12): do})``.

    A number is that of a step that is done, and of nothing being written just then: on a slow disk the save before
    would meet what happens. More may be added while a run goes on.
    """
    actions: dict[Any, Callable[[], object]] = {}

    class Acting(MetricsLog):
        def __call__(self, event):
            super().__call__(event)
            for what in (event.step if isinstance(event, StepDone) else type(event), (type(event), event.step)):
                if what in actions:
                    if isinstance(what, int):
                        writing = [thread for thread in threading.enumerate() if thread.name == "rung-save"]
                        for thread in writing:
                            thread.join()
                    actions.pop(what)()

    monkeypatch.setattr("rung.run.training.MetricsLog", Acting)
    # What is tried again is tried at the next step, and at the end without long waiting.
    monkeypatch.setattr(loop, "_FIRST_RETRY", 1e-6)
    monkeypatch.setattr(loop, "_LONGEST_RETRY", 1e-6)
    monkeypatch.setattr(loop, "_LAST_RETRY", 0.1)
    return actions.update


@pytest.fixture
def config_file(tiny, tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(settings.to_toml(tiny))
    return path


@pytest.fixture
def command(config_file, text, capfd) -> Callable[..., tuple[int, str]]:
    """Run ``rung train`` of the tiny model in a folder, or any command; returns status and all that was said."""

    def call(*words: object) -> tuple[int, str]:
        if words[0] == "train":
            words = ("train", text, "--config", config_file, *words[1:])
        capfd.readouterr()
        status = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return status, out + err

    return call


@pytest.fixture
def whole(undisturbed) -> Path:
    return Path(undisturbed["run"])


def is_whole(run: Path, whole: Path) -> None:
    """Assert that a run ended as the one that nothing happened to."""
    assert told(run) == told(whole)
    assert same_state(run, whole, 12)
    assert same_weights(run, whole)
    for name in ("latest", "best"):
        assert (run / name).read_text() == (whole / name).read_text()
    assert not [path for path in (run / "checkpoints").iterdir() if not path.name.isdecimal()]


# A full disk


def test_a_disk_that_is_full_while_saving_stops_nothing_and_is_told_of(disk, at, command, whole):
    """Disk full while saving: the last whole checkpoint stays the one to go on from, until there is room again."""
    run, seen = disk.path / "run", []

    def look() -> None:
        seen.append(((run / "latest").read_text(), {path.name for path in (run / "checkpoints").iterdir()}))
        at({SaveFailed: disk.free})  # at the second time

    # Room for a part of the arrays.
    at({7: lambda: disk.fill(leave=100_000), SaveFailed: look})
    status, said = command("train", "--run", run)
    assert status == 0, said
    assert f"step 8 was not saved: {FULL}; last whole checkpoint: step 4; it is tried again" in said
    assert seen == [("4\n", {"4"})]
    failed = read_metrics(run / "metrics.jsonl").of(SaveFailed)
    assert failed[0].step == 8
    assert len(failed) > 1
    assert {(one.reason, one.last_whole) for one in failed} == {(FULL, 4)}
    is_whole(run, whole)


def test_a_disk_still_full_at_the_end_is_waited_for_until_told_to_stop(disk, at, command, whole):
    run = disk.path / "run"
    ask = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    at({7: disk.fill, 12: ask.start})
    status, said = command("train", "--run", run)
    ask.join()
    assert status == 3
    assert "stopped at step 12 (SIGTERM), not saved; the last checkpoint is of step 4" in said
    assert f"go on with: rung resume {run}" in said
    assert said.count(f"step 12 was not saved: {FULL}") > 1  # tried more than once
    disk.free()
    status, said = command("resume", run)
    assert status == 0
    is_whole(run, whole)


def test_a_disk_that_has_room_again_at_the_end_takes_the_last_save(disk, at, command, whole):
    run = disk.path / "run"
    free = threading.Timer(1.0, disk.free)
    at({7: disk.fill, 12: free.start})
    status, said = command("train", "--run", run)
    free.join()
    assert status == 0
    assert f"step 12 was not saved: {FULL}" in said
    is_whole(run, whole)


def test_best_weights_log_and_samples_that_found_no_room_are_written_when_there_is_some(disk, at, train_tiny, tmp_path):
    changes = {"sample.every_steps": 2, "sample.max_tokens": 5}
    train_tiny(tmp_path / "whole", changes)
    said: list[str] = []
    at({3: disk.fill, 7: disk.free})  # the validation of step 4 is the best so far
    run = disk.path / "run"
    train_tiny(run, changes, say=said.append)
    assert any("model.safetensors" in line and FULL in line and "step 4 wait in memory" in line for line in said)
    is_whole(run, tmp_path / "whole")
    assert (run / "samples.jsonl").read_bytes() == (tmp_path / "whole/samples.jsonl").read_bytes()


def test_no_checkpoint_is_whole_before_its_log_is_on_the_disk(disk, at, train_tiny, tmp_path):
    """Else a process killed then would resume after lines that were only in its memory."""
    changes = {"evaluate.every_steps": 12}
    train_tiny(tmp_path / "whole", changes)
    run, elsewhere = disk.path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen: list[str] = []

    def look() -> None:
        seen.extend(path.name for path in elsewhere.iterdir() if path.name.isdecimal())
        disk.free()

    def fill() -> None:
        end_a_page(run / "metrics.jsonl")
        disk.fill()
        (run / "checkpoints").symlink_to(elsewhere)  # there is room for them

    at({2: fill, SaveFailed: look})
    train_tiny(run, changes)
    assert seen == []
    assert {one.reason for one in read_metrics(run / "metrics.jsonl").of(SaveFailed)} == {FULL}
    is_whole(run, tmp_path / "whole")


def end_a_page(path: Path) -> None:
    """Write a blank line up to the end of a page of memory, behind which a full disk takes nothing."""
    with open(path, "ab") as file:
        file.write(b" " * (4095 - file.tell() % 4096) + b"\n")


def test_a_report_that_finds_no_room_is_written_by_a_resume(disk, at, command, whole):
    run = disk.path / "run"

    def fill() -> None:
        end_a_page(run / "metrics.jsonl")
        disk.fill()

    at({(Saved, 12): fill})
    status, said = command("train", "--run", run)
    assert status == 0, said
    assert f"the report of {run} cannot be written: {FULL}" in said
    assert f"the last lines of {run / 'metrics.jsonl'} are not written: {FULL}" in said
    disk.free()
    status, said = command("resume", run)
    assert status == 0
    assert f"{run} is done: 12 steps" in said
    assert (run / "report.html").stat().st_size > 10_000
    is_whole(run, whole)


def test_best_weights_that_are_gone_come_back_from_the_best_checkpoint(command, whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/12")
    (run / "latest").write_text("8\n")
    (run / "model.safetensors").unlink()
    weights = load_best_of(run, 8)
    status, said = command("resume", run, "--time-limit", "0.001")
    assert status == 3
    assert f"no weights at {run / 'model.safetensors'}; written again, as they are at step 8" in said
    assert weights == {name: array.tobytes() for name, array in read(run / "model.safetensors").items()}
    assert command("resume", run)[0] == 0
    is_whole(run, whole)


def load_best_of(run: Path, step: int) -> dict[str, bytes]:
    state = read(run / f"checkpoints/{step}/state.safetensors")
    return {
        name.removeprefix("weights."): array.tobytes() for name, array in state.items() if name.startswith("weights.")
    }


def read(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path)


def test_a_resume_on_a_full_disk_loses_nothing(disk, at, command, whole):
    run = disk.path / "run"
    at({6: lambda: os.kill(os.getpid(), signal.SIGINT)})
    assert command("train", "--run", run)[0] == 3
    (run / "config.toml.tmp").unlink(missing_ok=True)
    # A line after the checkpoint, so that the log has to be cut.
    with open(run / "metrics.jsonl", "ab") as log:
        log.write(b'{"event": "step", "step": 9}\n')
    disk.fill()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    status, said = command("resume", run)
    assert status in (1, 2)
    assert FULL.lower() in said.lower()
    assert "hint:" in said
    assert {path: path.read_bytes() for path in before} == before
    disk.free()
    assert command("resume", run)[0] == 0
    is_whole(run, whole)


def test_a_run_that_finds_no_room_to_begin_leaves_nothing(disk, command):
    disk.fill()
    status, said = command("train", "--run", disk.path / "run")
    assert status in (1, 2)
    assert FULL.lower() in said.lower()
    assert "hint:" in said
    assert [path.name for path in disk.path.iterdir()] == ["ballast"]


# What may not be written


def test_checkpoints_that_become_read_only_stop_nothing(disk, at, command, whole):
    run = disk.path / "run"
    folder = run / "checkpoints"

    def lock() -> None:
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    at({5: lock, 10: lambda: subprocess.run(["umount", folder], check=True)})
    status, said = command("train", "--run", run)
    assert status == 0, said
    assert "step 8 was not saved: Read-only file system; last whole checkpoint: step 4" in said
    is_whole(run, whole)


def test_a_read_only_run_is_not_resumed_and_says_why(disk, at, command, whole):
    run = disk.path / "run"
    at({6: lambda: os.kill(os.getpid(), signal.SIGINT)})
    assert command("train", "--run", run)[0] == 3
    disk.mode("ro")
    status, said = command("resume", run)
    assert status == 2
    assert f"rung: cannot write in {run}: read-only file system\nhint: make the folder writable" in said
    disk.mode("rw")
    assert command("resume", run)[0] == 0
    is_whole(run, whole)


def test_a_permission_that_is_taken_away_and_given_back_stops_nothing(at, command, tmp_path, whole):
    run = tmp_path / "run"
    folder = run / "checkpoints"

    def lock() -> None:
        folder.chmod(0o555)
        obey_permissions(True)

    def unlock() -> None:
        obey_permissions(False)
        folder.chmod(0o755)

    at({5: lock, 10: unlock})
    try:
        status, said = command("train", "--run", run)
    finally:
        obey_permissions(False)
    assert status == 0
    assert "step 8 was not saved: Permission denied; last whole checkpoint: step 4" in said
    is_whole(run, whole)
    run.chmod(0o555)
    (run / "lock").unlink(missing_ok=True)
    obey_permissions(True)
    try:
        status, said = command("resume", run)
    finally:
        obey_permissions(False)
        run.chmod(0o755)
    assert status == 2
    assert f"cannot write in {run}: permission denied" in said


def obey_permissions(obey: bool) -> None:
    """Let root do without its power to write where it may not: in this thread, and those that it starts."""
    if os.getuid() != 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()
    assert library.capget(header, sets) == 0
    powers = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    sets[0] = sets[0] & ~powers if obey else sets[0] | sets[1] & powers
    assert library.capset(header, sets) == 0


# A folder that is gone


def test_a_run_whose_folder_is_deleted_says_that_nothing_is_saved(at, command, tmp_path):
    run = tmp_path / "run"
    at({5: lambda: shutil.rmtree(run)})
    status, said = command("train", "--run", run)
    assert status == 1
    assert "step 8 was not saved: No such file or directory; last whole checkpoint: none" in said
    assert f"rung: {run} is gone, and the run has ended" in said
    assert not run.exists()


def test_a_run_that_is_stopped_after_its_folder_was_deleted_does_not_say_that_it_can_go_on(at, command, tmp_path):
    run = tmp_path / "run"
    at({5: lambda: shutil.rmtree(run), 7: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    status, said = command("train", "--run", run)
    assert status == 1
    assert f"rung: {run} is gone" in said
    assert "go on with" not in said


def test_a_run_whose_folder_was_elsewhere_for_a_while_is_saved_again(at, command, tmp_path, whole):
    run, away = tmp_path / "run", tmp_path / "away"
    at({5: lambda: run.rename(away), 10: lambda: away.rename(run)})
    status, said = command("train", "--run", run)
    assert status == 0, said
    assert "step 8 was not saved: No such file or directory" in said
    is_whole(run, whole)


# Two processes


def test_a_run_that_is_being_trained_is_refused_to_others(at, command, text, config_file, tmp_path, capfd, whole):
    run, refused = tmp_path / "run", []

    def others() -> None:
        for words in (["resume", run], ["train", text, "--config", config_file, "--run", run, "--overwrite"]):
            refused.append(main([str(word) for word in words]))

    at({6: others})
    status, said = command("train", "--run", run)
    assert status == 0, said
    assert refused == [2, 2]
    assert said.count(f"{run} is being trained by process {os.getpid()}") == 2
    is_whole(run, whole)


# Killed in the middle of a save


SAVER = """
    import os, shutil, signal, sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from rung.train import checkpoint
    from rung.train.checkpoint import Checkpoints, Progress

    run, mode = Path(sys.argv[1]), sys.argv[2]

    def counted(call):
        # Dies before its n-th call of anything that changes the disk.
        def counting(*arguments, **options):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return counting

    def half(arrays, path):
        # Dies with half of the arrays written.
        real(arrays, path)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def save():
        checkpoints = Checkpoints(run, keep=2)
        state = {"weights": {"up": jnp.full((64, 64), 8.0)}, "step": jnp.int32(8)}
        checkpoints.save(state, Progress(8, best_step=8, best_loss=1.0))
        outcome = checkpoints.wait()
        os._exit(0 if outcome.error is None else 9)

    real = checkpoint.save_file
    calls = 0
    while True:
        # JAX does not mix with forks once it has devices: each child makes its own.
        pid = os.fork()
        if not pid:
            left = calls
            if mode == "half":
                checkpoint.save_file = half
            else:
                for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
                    setattr(os, name, counted(getattr(os, name)))
                checkpoint.save_file = counted(real)
            save()
        status = os.waitpid(pid, 0)[1]
        print(status, flush=True)
        sys.stdin.readline()
        calls += 1
"""


@pytest.mark.parametrize("mode", ["each", "half"])
def test_a_save_killed_at_any_point_leaves_the_old_checkpoint_or_the_new(tmp_path, mode):
    """Before the arrays, between arrays and record, before the rename, before the pointers, while old ones go."""
    import jax
    import jax.numpy as jnp

    from rung.config import MeshConfig
    from rung.mesh import make_mesh, replicated
    from rung.train.checkpoint import Checkpoints, Progress

    def state_of(step: int):
        tree = {"weights": {"up": jnp.full((64, 64), float(step))}, "step": jnp.int32(step)}
        return jax.device_put(tree, replicated(make_mesh(MeshConfig())))

    def begin() -> None:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        checkpoints = Checkpoints(run, keep=2)
        for step in (2, 3, 4):
            checkpoints.save(state_of(step), Progress(step, best_step=2, best_loss=2.0))
            assert checkpoints.wait().error is None

    run = tmp_path / "run"
    begin()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "3", "4"}
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVER), run, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        seen = []
        for line in process.stdout:
            status = int(line)
            left = {path.name for path in (run / "checkpoints").iterdir()}
            checkpoints = Checkpoints(run, keep=2)
            restored = checkpoints.restore(state_of(0))
            step = restored.progress.step
            assert restored.problems == []
            assert np.asarray(restored.state["weights"]["up"]).tobytes() == np.full((64, 64), step, "f4").tobytes()
            assert {path.name for path in (run / "checkpoints").iterdir()} <= {"2", "3", "4", "8"}
            # It goes on from there.
            checkpoints.save(state_of(9), Progress(9, best_step=9, best_loss=0.5))
            assert checkpoints.wait().error is None
            assert (run / "latest").read_text() == (run / "best").read_text() == "9\n"
            seen.append((step, left))
            if status == 0 or mode == "half":
                process.kill()
                break
            assert status == signal.SIGKILL
            begin()
            process.stdin.write("\n")
            process.stdin.flush()
    steps = [step for step, _ in seen]
    if mode == "half":
        assert seen == [(4, {"2", "3", "4", "8.tmp"})]
        return
    # The old one up to some point, from there on the new one.
    assert steps == sorted(steps)
    assert set(steps) == {4, 8}
    assert steps.count(4) >= 6
    assert steps.count(8) >= 6
    assert any("3.old" in left for _, left in seen)


# Other devices


@pytest.mark.slow
def test_saved_on_four_devices_it_goes_on_on_one_two_or_eight(train_tiny, tmp_path):
    """The same examples in the same order; losses equal within float tolerance."""
    changes = {"mesh.data": 4, "train.batch_size": 8, "evaluate.batch_size": 8, "model.dropout": 0.1}
    four = tmp_path / "four"
    train_tiny(four, changes)
    shutil.copytree(four, tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun/checkpoints/12")
    (tmp_path / "begun/latest").write_text("8\n")
    for n in (1, 2, 8):
        run = tmp_path / str(n)
        shutil.copytree(tmp_path / "begun", run)
        if n <= 4:
            resume(run, changes={"mesh.data": n}, say=lambda line: None)
        else:
            words = [sys.executable, "-m", "rung", "resume", str(run), "--mesh", f"data={n}"]
            flags = f"--xla_force_host_platform_device_count={n}"
            environment = {**os.environ, "PYTHONPATH": str(SOURCE), "XLA_FLAGS": flags}
            subprocess.run(words, check=True, env=environment, capture_output=True)
        (resumed,) = read_metrics(run / "metrics.jsonl").resumed
        assert resumed.changes == [f"mesh.data 4 -> {n}"]
        (steps, evaluations), (expected, expected_evaluations) = told(run), told(four)
        columns, expected_columns = np.array(steps), np.array(expected)
        np.testing.assert_array_equal(columns[:, :2], expected_columns[:, :2])  # steps and targets
        np.testing.assert_allclose(columns, expected_columns, rtol=1e-5)
        np.testing.assert_allclose(evaluations, expected_evaluations, rtol=1e-5)


# Interrupts


SWALLOWED = """
    import signal, sys, time
    from rung.host import interrupts_heard

    class Late:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # the handler raises here, and nothing comes out

    try:
        with interrupts_heard():
            one = Late()
            del one
            time.sleep(5)
            print("went on")
    except KeyboardInterrupt:
        print("heard")
"""


def test_an_interrupt_that_falls_where_python_swallows_it_is_heard():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SWALLOWED)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("heard\n", "")
