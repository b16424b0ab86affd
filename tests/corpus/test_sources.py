"""Sources: what a user may name, and what each mistake is answered with."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest

from rung.corpus.sources import fingerprint, resolve
from rung.errors import RungError


def names(sources):
    return [source.name for source in resolve(sources)]


def test_a_folder_is_all_its_files_in_sorted_order_but_hidden_ones(tmp_path):
    book = tmp_path / "book"
    for name in ("b.txt", "a.md", "part/z", ".hidden", ".git/config", "part/.cache"):
        path = book / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    assert names([str(book)]) == ["book/a.md", "book/b.txt", "book/part/z"]
    assert names([str(book) + "/"]) == ["book/a.md", "book/b.txt", "book/part/z"]


def test_a_glob_takes_what_matches_and_a_name_that_exists_is_no_glob(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.md", "x[1].txt"):
        (tmp_path / name).write_text("text")
    assert names(["*.txt"]) == ["a.txt", "b.txt", "x[1].txt"]
    assert names(["x[1].txt"]) == ["x[1].txt"]
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/d.txt").write_text("text")
    assert names(["**/*.txt"]) == ["a.txt", "b.txt", "deep/er/d.txt", "x[1].txt"]


def test_standard_input_is_spooled_so_that_it_reads_twice(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("雪国".encode())))
    (source,) = resolve(["-"])
    for _ in range(2):
        with source.open() as file:
            assert file.read().decode() == "雪国"
    assert (source.name, source.size) == ("-", 6)
    path = source.path
    del source
    assert not path.exists()


def test_a_pipe_is_spooled_too():
    read, write = os.pipe()
    os.write(write, b"from a pipe")
    os.close(write)
    (source,) = resolve([f"/dev/fd/{read}"])
    os.close(read)
    with source.open() as file:
        assert file.read() == b"from a pipe"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: [], "no text named"),
        (lambda folder: ["missing.txt"], "no file or folder missing.txt"),
        (lambda folder: ["*.nothing"], "no file matches"),
        (lambda folder: [folder / "empty"], "no files in folder"),
        (lambda folder: [folder / "hollow.txt"], "is empty"),
        (lambda folder: [folder / "hollow"], "no text"),
        (lambda folder: [folder / "novel.txt", folder], "named twice"),
        (lambda folder: ["/dev/null"], "not a regular file"),
    ],
)
def test_each_mistake_has_a_line_of_its_own(tmp_path, make, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/a.txt").touch()
    (tmp_path / "hollow.txt").touch()
    (tmp_path / "novel.txt").write_text("text")
    with pytest.raises(RungError, match=said.replace("*", r"\*")) as caught:
        resolve(make(tmp_path))
    assert "\n" not in caught.value.problem
    assert caught.value.hint


def test_a_misspelt_name_is_answered_with_the_near_one(tmp_path):
    (tmp_path / "novel.txt").write_text("text")
    with pytest.raises(RungError) as caught:
        resolve([tmp_path / "novle.txt"])
    assert "novel.txt?" in caught.value.hint


def test_the_fingerprint_sees_edits_of_small_files_and_of_large_ones(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"a" * 1000)
    with large.open("wb") as file:
        file.truncate(40 << 20)

    def change(path, where):
        (source,) = resolve([path])
        before = fingerprint(source)
        with path.open("r+b") as file:
            file.seek(where)
            file.write(b"!")
        return before["sha256"] != fingerprint(source)["sha256"]

    assert change(small, 500)
    for where in (0, (1 << 20) - 1, (40 << 20) - 1):
        assert change(large, where)
    (source,) = resolve([large])
    sampled, full = fingerprint(source), fingerprint(source, full=True)
    assert (sampled["sampled"], full["sampled"]) == (True, False)
    assert change(large, 1 << 21) is False  # between the samples: this is what a full hash is for
    assert fingerprint(source, full=True)["sha256"] != full["sha256"]
