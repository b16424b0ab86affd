"""Data sets of the Hub: from a folder laid out like one, and what the library raises where there is none to be had."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rung.errors import RungError

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from rung.corpus.hub import HubDataset  # noqa: E402 - after what it takes

README = """---
configs:
- config_name: works
  data_files:
  - split: train
    path: data/train-*.parquet
  - split: test
    path: data/test.parquet
- config_name: letters
  data_files:
  - split: train
    path: data/letters.parquet
---
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "novels" / "data"
    data.mkdir(parents=True)
    (data.parent / "README.md").write_text(README)
    for k in range(2):
        rows = [{"text": f"work {k}.{n}", "meta": {"title": f"t{n}"}, "scan": b"\xff"} for n in range(3)]
        pq.write_table(pa.Table.from_pylist(rows), data / f"train-0000{k}.parquet")
    pq.write_table(pa.table({"text": ["held", None, "out"]}), data / "test.parquet")
    pq.write_table(pa.table({"body": ["dear"], "n": [1]}), data / "letters.parquet")
    return data.parent


def texts(*arguments, first=0, **named):
    return [row.text for row in HubDataset(*map(str, arguments), **named).rows(first)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_split_is_its_rows_in_order_with_their_other_columns(folder, streaming):
    source = HubDataset(str(folder), config="works", streaming=streaming)
    rows = list(source.rows())
    assert [row.text for row in rows] == [f"work {k}.{n}" for k in range(2) for n in range(3)]
    assert rows[4].metadata == {"meta": {"title": "t1"}}
    assert source.left_out == {"column scan (bytes)": 1}
    assert source.title == "novels"
    assert [file["name"] for file in source.files] == ["data/train-00000.parquet", "data/train-00001.parquet"]
    assert texts(folder, config="works", split="test", streaming=streaming) == ["held", "", "out"]
    assert texts(folder, config="letters", column="body", streaming=streaming) == ["dear"]
    for first in (1, 3, 6, 9):
        assert [row.text for row in source.rows(first)] == [row.text for row in rows[first:]]


def test_a_part_of_a_split_where_it_is_not_streamed(folder):
    assert texts(folder, config="works", split="train[1:3]") == ["work 0.1", "work 0.2"]
    with pytest.raises(RungError, match="without --streaming"):
        texts(folder, config="works", split="train[1:3]", streaming=True)


def test_json_lines_without_a_readme_are_a_data_set_too(tmp_path):
    path = tmp_path / "plain" / "train.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a", "n": 1}\n{"text": "b", "n": 2}\n')
    assert texts(path.parent) == texts(path.parent, streaming=True) == ["a", "b"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("asked", "problem", "hint"),
    [
        ({}, "has several configs, and none is named", "--config works, letters"),
        ({"config": "work"}, "has no config 'work'", "did you mean works?"),
        ({"config": "works", "split": "tran"}, "has no split 'tran' of config 'works'", "did you mean train?"),
        ({"config": "works", "column": "txt"}, "has no column 'txt'", "did you mean --text-column text?"),
        ({"config": "letters"}, "has no column 'text'", "name one of body, n"),
        ({"config": "letters", "column": "n"}, "column 'n' is int64, not text", "--text-column NAME"),
        ({"config": "works", "column": "meta"}, "column 'meta' is dict, not text", "--text-column NAME"),
    ],
)
def test_what_a_data_set_has_not_is_said_with_what_it_has(folder, streaming, asked, problem, hint):
    with pytest.raises(RungError) as caught:
        texts(folder, streaming=streaming, **asked)
    assert problem in caught.value.problem
    assert hint in caught.value.hint


def test_a_damaged_file_and_a_folder_without_data_are_said(folder, tmp_path):
    (folder / "data/letters.parquet").write_bytes(b"PAR1 but no more")
    for streaming in (False, True):
        with pytest.raises(RungError, match=r"cannot be read: .*[Pp]arquet"):
            texts(folder, config="letters", column="body", streaming=streaming)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RungError, match="has no data files"):
        texts(tmp_path / "empty")
    with pytest.raises(RungError, match="no folder"):
        texts(tmp_path / "nothing")


def test_offline_is_said_as_what_it_is():
    with pytest.raises(RungError) as caught:
        texts("globis-university/aozorabunko-clean")
    assert "HF_HUB_OFFLINE forbids the network" in caught.value.problem


# What the library raises against a server: one of our own, on this machine


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers every request for a repository as the Hub does where it is not there, not ours, or not well."""

    def do_GET(self):
        case = next((name for name in ("missing", "gated", "ill", "here") if f"/{name}" in self.path), "missing")
        status, code = {"missing": (401, "RepoNotFound"), "gated": (403, "GatedRepo"), "ill": (503, "")}.get(
            case, (404, "RevisionNotFound")
        )
        body = json.dumps({"error": case}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", case)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def endpoint():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


_PROGRAM = """
import sys, time
time.sleep = lambda seconds: None  # between tries
from rung.corpus.hub import HubDataset
from rung.errors import RungError
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        HubDataset(name, revision=revision or None, streaming=True)
    except RungError as error:
        print(error.problem, "|", error.hint)
"""


def answers(endpoint, tmp_path, *names):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *names], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


def test_missing_gated_and_unknown_revisions_are_told_apart(endpoint, tmp_path):
    missing, gated, revision = answers(endpoint, tmp_path, "owner/missing", "owner/gated", "owner/here@v9")
    assert missing.startswith("no data set owner/missing on the Hub, or none that you may see | look at the spelling")
    assert gated.startswith("owner/gated is gated: its owner gives access by name | ask for access at https://")
    assert revision.startswith("owner/here has no revision 'v9' |")


def test_a_hub_that_does_not_answer_is_said(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        port = server.server_port
    (line,) = answers(f"http://127.0.0.1:{port}", tmp_path, "owner/missing")  # nobody listens there any more
    assert line.startswith("the Hub does not answer, and owner/missing is not in the cache")
    assert "look at the network and its proxy" in line


def test_without_the_library_the_way_to_get_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RungError) as caught:
        texts("owner/name")
    assert "pip install 'rung[hub]'" in caught.value.hint
