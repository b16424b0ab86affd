"""The same documents as text, rows and archives: the same tokens, the same choices, the same loss."""

from __future__ import annotations

import gzip
import json
import zipfile

import numpy as np
import pytest

import rung
from rung.config import Config, DataConfig
from rung.errors import RungError
from rung.run.prepare import prepare
from rung.run.store import build, train_tokenizer

SEPARATOR = "<|endoftext|>"


def quiet(line):
    pass


@pytest.fixture(scope="module")
def novel(text):
    """Return documents cut from a novel, one of them empty, one with a separator in other text."""
    whole = text.read_text(encoding="utf-8")
    return [*(whole[start : start + 600] for start in range(0, len(whole) - 600, 600)), "", "雪国🚂\r\n\u2028"]


@pytest.fixture(scope="module")
def packed(novel, tmp_path_factory):
    """Return ``{kind: (file, settings)}`` of the same documents."""
    folder = tmp_path_factory.mktemp("packed")
    lines = "\n".join(json.dumps({"body": text, "n": n}) for n, text in enumerate(novel))
    made = {
        "jsonl": (folder / "a.jsonl", {"text_column": "body"}),
        "gzip": (folder / "a.ndjson.gz", {"text_column": "body"}),
        "zip": (folder / "a.zip", {}),
    }
    made["jsonl"][0].write_text(lines)
    made["gzip"][0].write_bytes(gzip.compress(lines.encode()))
    with zipfile.ZipFile(made["zip"][0], "w") as archive:
        for number, text in enumerate(novel):
            archive.writestr(f"{number:03d}.txt", text)
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return made
    made["parquet"] = (folder / "a.parquet", {"text_column": "body"})
    pq.write_table(pa.table({"body": novel, "n": list(range(len(novel)))}), made["parquet"][0])
    return made


def tokens_of(store):
    return {
        name: (store.split(name).read(0, len(store.split(name))), store.split(name).document_starts)
        for name in store.splits
    }


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zip", "parquet"])
def test_tokenizer_and_tokens_do_not_depend_on_what_documents_come_in(novel, packed, tmp_path, kind):
    if kind not in packed:
        pytest.skip("pyarrow is not installed")
    path, settings = packed[kind]
    (tmp_path / "plain.txt").write_bytes(SEPARATOR.join([*novel, ""]).encode())
    stores = []
    for source, data in ((tmp_path / "plain.txt", {"separator": SEPARATOR}), (path, settings)):
        file = tmp_path / f"{source.suffix}.json"
        config = rung.config.override(Config(), {f"data.{key}": value for key, value in data.items()})
        train_tokenizer([str(source)], rung.config.override(config, {"tokenizer.vocab_size": 400}), file, say=quiet)
        out = tmp_path / f"tokens{source.suffix}"
        stores.append(build([str(source)], file, out, DataConfig(**data, validation_fraction=0.2), say=quiet))
    assert stores[0].tokenizer_hash == stores[1].tokenizer_hash
    assert [store.empty_documents for store in stores] == [1, 1]
    plain, other = map(tokens_of, stores)
    assert plain.keys() == other.keys() == {"train", "validation"}
    for name in plain:
        np.testing.assert_array_equal(plain[name][0], other[name][0])
        np.testing.assert_array_equal(plain[name][1], other[name][1])


def test_what_is_chosen_for_a_text_does_not_depend_on_its_packing(text, tmp_path):
    (tmp_path / "novel.txt").write_bytes(text.read_bytes() * 30)
    (tmp_path / "novel.txt.gz").write_bytes(gzip.compress(text.read_bytes() * 30))
    chosen = []
    for name in ("novel.txt", "novel.txt.gz"):
        (tmp_path / name.replace(".", "-")).mkdir()
        said = []
        prepare([str(tmp_path / name)], None, {}, tmp_path / name.replace(".", "-"), said.append)
        chosen.append([line for line in said if line.startswith("chosen")])
    assert chosen[0] == chosen[1] != []


def test_a_text_is_evaluated_alike_in_rows_and_plain(undisturbed, tmp_path):
    text = "It was a dark and stormy night."
    (tmp_path / "night.txt").write_text(text)
    (tmp_path / "night.jsonl").write_text(json.dumps({"body": text}))
    plain = rung.evaluate(undisturbed["run"], tmp_path / "night.txt")
    rows = rung.evaluate(undisturbed["run"], tmp_path / "night.jsonl", reading={"data.text_column": "body"})
    assert (rows.loss, rows.targets) == (plain.loss, plain.targets)
    with pytest.raises(RungError, match="has no column 'text'"):
        rung.evaluate(undisturbed["run"], tmp_path / "night.jsonl")


def test_a_store_remembers_how_its_text_was_read(packed, tmp_path):
    path, settings = packed["jsonl"]
    train_tokenizer(
        [str(path)], rung.config.override(Config(), {"data.text_column": "body"}), tmp_path / "t", say=quiet
    )
    store = build([str(path)], tmp_path / "t", tmp_path / "tokens", DataConfig(**settings), say=quiet)
    assert store.differences([path], data=DataConfig(**settings)) == []
    changed = store.differences([path], data=DataConfig())
    assert changed == ["data.text_column: 'text' now, 'body' in the store"]
