"""The program itself: what it imports, what the locale does to it, signals, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "rung"]


def environment(**changes: str) -> dict[str, str]:
    dropped = ("PYTHONIOENCODING", "PYTHONUTF8", "LANG", "LC_ALL", "LC_CTYPE", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "LC_ALL": "C.UTF-8"} | changes


def start(*words: object, **rest) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*PROGRAM, *map(os.fsencode, map(str, words))], capture_output=True, env=rest.pop("env", environment()), **rest
    )


HEAVY = {"jax", "jaxlib", "numpy", "optax", "orbax", "rich", "tokenizers", "tiktoken", "matplotlib", "safetensors"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["tran"], ["tokenizer"]])
def test_help_imports_nothing_heavy(words):
    program = (
        "import sys; from rung.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print(*sorted({HEAVY} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment())
    assert done.stderr.splitlines()[-1] == ""


LOCALES = [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "POSIX"}]


@pytest.mark.parametrize("locale", LOCALES, ids=lambda locale: "-".join(locale.values()))
def test_text_is_utf8_under_every_locale(trained, bpe, locale):
    env = environment(**locale)
    shown = start("tokenizer", "show", "国境é", "--tokenizer", bpe, "--json", env=env)
    ids = json.loads(shown.stdout)["ids"]
    encoded = start("tokenizer", "encode", "--tokenizer", bpe, input="国境é".encode(), env=env)
    assert [int(word) for word in encoded.stdout.split()] == ids
    decoded = start("tokenizer", "decode", "--tokenizer", bpe, input=encoded.stdout, env=env)
    assert decoded.stdout == "国境é".encode()


@pytest.mark.medium
def test_a_japanese_prompt_is_printed_as_it_is_under_locale_c(trained):
    done = start("generate", trained[0], "国境の", "--max-tokens", 2, env=environment(**LOCALES[1]))
    assert done.stdout.startswith("国境の".encode())


def test_a_word_that_is_not_utf8_is_refused(bpe):
    done = subprocess.run(
        [*PROGRAM, "tokenizer", "show", b"a\xffb", "--tokenizer", bpe], capture_output=True, env=environment()
    )
    assert done.returncode == 2
    assert b"the text is not UTF-8: byte 0xff at offset 1" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["tokenizer", "encode", "--tokenizer", "BPE"]])
def test_a_reader_that_goes_away_is_no_error(bpe, words):
    reading, writing = os.pipe()
    os.close(reading)
    words = [bpe if word == "BPE" else word for word in words]
    done = subprocess.run(
        [*PROGRAM, *words], input=b"x y z " * 50_000, stdout=writing, stderr=subprocess.PIPE, env=environment()
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.medium
def test_a_cpu_that_was_not_asked_for_devices_emulates_them(text, tiny, trained, tmp_path):
    flags = (*tiny, "--vocab-size", 300, "--mesh", "data=2", "--run", tmp_path / "run", "--json")
    done = start("train", text, *flags)
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["validation_loss"] == pytest.approx(trained[1].json["validation_loss"], rel=1e-4)
    assert "2 x cpu" in done.stderr.decode()
    # Not a terminal: no control characters.
    assert b"\x1b" not in done.stderr
    assert b"\r" not in done.stderr


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_status_3(text, tiny, tmp_path, number):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            *PROGRAM,
            "train",
            str(text),
            *tiny,
            "--steps",
            "100000",
            "--run",
            str(run),
            "--json",
            "--tokenizer.kind",
            "byte",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3, err.decode()
    result = json.loads(out.splitlines()[-1])
    assert result["stopped"] == signal.Signals(number).name
    assert (run / "latest").read_text() == f"{result['steps']}\n"
    assert f"go on with: rung resume {run}" in err.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_leaves_nothing(number, tmp_path):
    os.mkfifo(tmp_path / "text")  # the command waits for its text
    process = subprocess.Popen(
        [*PROGRAM, "train", "text", "--run", "runs/run"], stderr=subprocess.PIPE, env=environment(), cwd=tmp_path
    )
    while not (tmp_path / "runs").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.slow
def test_compilations_are_kept_in_the_users_cache_and_change_no_bit(text, tmp_path):
    """Cold, warm, with every kept program damaged, and where nothing can be kept: the same weights."""
    tiny = ("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--steps", "2", "--json")
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        env.pop(name, None)

    def weights(name: str, **changes: str) -> bytes:
        done = start("train", text, *tiny, "--run", tmp_path / name, env=env | changes)
        assert done.returncode == 0, done.stderr
        assert b"Warning" not in done.stderr
        assert b"Traceback" not in done.stderr
        return (tmp_path / name / "model.safetensors").read_bytes()

    cold = weights("cold")
    kept = list((tmp_path / "cache/rung/compiled").rglob("*-cache"))
    used = next((tmp_path / "cache").rglob("jit_step-*-atime"))
    before = used.read_bytes()
    assert weights("warm") == cold
    assert used.read_bytes() != before  # it was found there
    for path in kept:
        path.write_bytes(path.read_bytes()[:100])
    used.unlink()  # a process was killed between the program and the note of its use
    assert weights("damaged") == cold
    (tmp_path / "file").touch()
    assert weights("nowhere", XDG_CACHE_HOME=str(tmp_path / "file")) == cold


def test_without_a_home_or_with_a_cache_of_ones_own_nothing_is_set(tmp_path):
    """A user whom the system does not know has no home; a folder that somebody else fills keeps its own limit."""
    program = (
        "import os; from pathlib import Path; from rung.host import keep_compilations\n"
        "def nowhere(): raise RuntimeError('Could not determine home directory.')\n"
        "Path.home = nowhere; keep_compilations()\n"
        "print(*sorted(name for name in os.environ if name.startswith('JAX_COMPILATION')))"
    )
    env = environment()
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        env.pop(name, None)
    for own, known in (({}, ""), ({"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}, "JAX_COMPILATION_CACHE_DIR")):
        done = subprocess.run([sys.executable, "-c", program], env=env | own, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (known, "")
