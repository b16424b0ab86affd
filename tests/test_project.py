"""The project around the code: pinned versions, shipped files, the make targets' first step, the wheel."""

from __future__ import annotations

import hashlib
import lzma
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rung import config

ROOT = Path(__file__).parents[1]
LOCKED_EXTRAS = ("flax", "gpu", "tensorboard", "wandb", "languages", "test", "lint")
NOVELS = {
    "emma": 883_029,
    "mansfield-park": 883_281,
    "northanger-abbey": 433_412,
    "persuasion": 466_855,
    "pride-and-prejudice": 684_769,
    "sense-and-sensibility": 673_687,
}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def locked(name: str, python: str) -> dict[str, Version]:
    """Return the versions that a lock file pins for a Python version."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    chosen = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    assert len({pin.name for pin in chosen}) == len(chosen), "a package is pinned twice"
    assert all([s.operator for s in pin.specifier] == ["=="] for pin in pins), "a line does not pin one version"
    return {pin.name: Version(next(iter(pin.specifier)).version) for pin in chosen}


# The lock


@pytest.mark.parametrize(("python", "jax"), [("3.11", "0.10"), ("3.13", "0.12")])
def test_the_lock_satisfies_what_the_project_asks_for(python, jax):
    pins = locked("requirements.lock", python)
    extras = project()["optional-dependencies"]
    for text in [*project()["dependencies"], *(text for name in LOCKED_EXTRAS for text in extras[name])]:
        asked = Requirement(text)
        assert asked.specifier.contains(pins[asked.name]), f"{text}, but {pins[asked.name]} is pinned"
    assert str(pins["jax"]).startswith(jax)


def test_the_parity_lock_satisfies_its_extras_and_agrees_with_the_main_one():
    pins, main = locked("requirements-parity.lock", "3.11"), locked("requirements.lock", "3.11")
    extras = project()["optional-dependencies"]
    for asked in map(Requirement, [*extras["parity"], *extras["ray"]]):
        assert asked.specifier.contains(pins[asked.name])
    assert not pins.keys() & main.keys()


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-parity.lock"])
def test_lock_files_name_no_download_address(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    assert " @ " not in text


# Shipped files


def test_the_demo_text_is_six_novels_of_known_size():
    files = sorted((ROOT / "src/rung/demo/austen").glob("*"))
    assert {f.stem: f.stat().st_size for f in files} == NOVELS


def test_the_demo_text_is_the_published_text_to_the_byte(shared_data):
    shipped = b"".join(f.read_bytes() for f in sorted((ROOT / "src/rung/demo/austen").glob("*.txt")))
    published = lzma.decompress((shared_data / "austen.txt.xz").read_bytes())
    assert hashlib.sha256(shipped).digest() == hashlib.sha256(published).digest()


@pytest.mark.parametrize("name", config.preset_names())
def test_a_preset_resolves_and_says_first_what_it_is(name):
    config.resolve(config.preset(name))
    assert (ROOT / f"src/rung/presets/{name}.toml").read_text(encoding="utf-8").startswith("# ")


# First steps on a fresh clone


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_make_refuses_an_old_python_and_says_which_it_needs(tmp_path):
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo \'Python 3.9.18\'\n[ "$1" = --version ]\n')
    old.chmod(0o755)
    done = make(tmp_path, f"PYTHON={old}", "demo")
    assert done.returncode != 0
    assert "needs Python 3.11 or later" in done.stdout
    assert "Python 3.9.18" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_alone_lists_its_targets(tmp_path):
    done = make(tmp_path)
    assert done.returncode == 0
    for target in ("demo", "test", "quick", "test-slow", "lint", "bench", "clean"):
        assert f"make {target} " in done.stdout


@pytest.mark.slow
def test_the_wheel_works_outside_the_clone(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("rung-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    program = (
        "import rung, rung.config as c; from importlib.resources import files;"
        "print(rung.__file__); [c.preset(n) for n in c.preset_names()]; print(*c.preset_names());"
        "print(*sorted(f.name for f in (files('rung') / 'demo' / 'austen').iterdir()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    where, presets, novels = done.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path / "site")
    assert presets.split() == config.preset_names()
    assert novels.split() == [f"{name}.txt" for name in NOVELS]
    assert (tmp_path / "site/rung/py.typed").exists()
    help_text = subprocess.run(
        [tmp_path / "site/bin/rung", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "train" in help_text.stdout
