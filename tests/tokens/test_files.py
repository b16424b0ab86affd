"""Files of ids that other programs made: recognised, held against the vocabulary, and refused where they are broken."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rung.errors import RungError
from rung.tokens.files import TokenFile, blocks, count_ids, is_token_file, look_into, open_token_file

VOCABULARY = 300
IDS = np.random.default_rng(0).integers(0, VOCABULARY, 5000)


def write(path: Path, ids=IDS, dtype="<u2") -> Path:
    """Write ids as each program does: safetensors and numpy by their own libraries."""
    if path.suffix == ".safetensors":
        save_file({"tokens": np.asarray(ids).astype(dtype)}, path)
    elif path.suffix == ".npy":
        np.save(path, np.asarray(ids).astype(dtype))
    else:
        np.asarray(ids).astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "dtype", "bin_type"),
    [
        ("a.safetensors", "<u2", ""),
        ("a.safetensors", "<i8", ""),
        ("a.npy", "<u2", ""),
        ("a.npy", ">u4", ""),  # the other byte order
        ("a.npy", "<i8", ""),
        ("a.bin", "<u2", ""),
        ("a.bin", "<u2", "uint16"),
        ("a.bin", "<u4", "uint32"),
    ],
)
def test_each_kind_of_file_gives_the_ids_that_its_own_library_wrote(tmp_path, name, dtype, bin_type):
    file = open_token_file(write(tmp_path / name, dtype=dtype), VOCABULARY, bin_type)
    np.testing.assert_array_equal(file.ids(), IDS)
    assert isinstance(file.ids(), np.memmap)
    read = list(blocks(file.path, file.dtype, file.offset, file.count, 999))
    assert [start for start, _ in read] == [0, 999, 1998, 2997, 3996, 4995]
    np.testing.assert_array_equal(np.concatenate([ids for _, ids in read]), IDS)


def test_the_header_of_llm_c_is_no_token(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = (20240520, 1, len(IDS))
    (tmp_path / "fineweb.bin").write_bytes(header.tobytes() + IDS.astype("<u2").tobytes())
    np.testing.assert_array_equal(open_token_file(tmp_path / "fineweb.bin", VOCABULARY).ids(), IDS)
    header[:3] = (20240801, 7, len(IDS))
    (tmp_path / "llama.bin").write_bytes(header.tobytes() + IDS.astype("<u4").tobytes())
    np.testing.assert_array_equal(open_token_file(tmp_path / "llama.bin", 128_000).ids(), IDS)


def test_a_name_says_whether_a_file_holds_ids(tmp_path):
    for name in ("a.bin", "a.npy", "a.safetensors"):
        assert is_token_file(write(tmp_path / name))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder.bin").mkdir()
    assert not is_token_file(tmp_path / "a.txt")
    assert not is_token_file(tmp_path / "folder.bin")
    assert not is_token_file(tmp_path / "missing.bin")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def safetensors(header: dict, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


U16 = {"dtype": "U16", "shape": [9], "data_offsets": [0, 18]}
BROKEN = {
    "odd.bin": (b"\1\0\2", "no whole number of uint16"),
    "empty.bin": (b"", "holds no tokens"),
    "header-only.bin": (struct.pack("<3i", 20240520, 1, 100) + bytes(1012), "its header says 1,224"),
    "longer.bin": (
        struct.pack("<3i", 20240520, 1, 3) + bytes(1012) + bytes(8),
        "1,032 bytes, and its header says 1,030",
    ),
    "negative.bin": (struct.pack("<3i", 20240520, 1, -5) + bytes(1012), "its header says"),
    "magic.npy": (b"not numpy at all", "is not a .npy file"),
    "nothing.npy": (b"", "is not a .npy file"),
    "huge.npy": (npy("{'descr': '<u2', 'fortran_order': False, 'shape': (3,)}" + " " * 30_000), "is not a .npy file"),
    "version.npy": (b"\x93NUMPY\x09\x00" + bytes(40), "version 9.0 of the format"),
    "cut.npy": (npy("{'descr': '<u2', 'fortran_order': False, 'shape': (9,)}\n", bytes(10)), "bytes, and its header"),
    "longer.npy": (
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1,)}\n", bytes(10)),
        "bytes, and its header",
    ),
    "float.npy": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}\n", bytes(4)),
        "float32 .1., not one row",
    ),
    "bool.npy": (npy("{'descr': '|b1', 'fortran_order': False, 'shape': (4,)}\n", bytes(4)), "not one row of whole"),
    "square.npy": (
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1, 2)}\n", bytes(4)),
        "not one row of whole",
    ),
    "object.npy": (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", bytes(8)), "not one row of whole"),
    "none.npy": (npy("{'descr': '<u2', 'fortran_order': False, 'shape': (0,)}\n"), "holds no tokens"),
    "huge.safetensors": (struct.pack("<Q", 1 << 60) + b"{}", "header is longer than the file"),
    "cut.safetensors": (safetensors({"tokens": U16}, bytes(17)), "the file ends before"),
    "short.safetensors": (b"\1\0", "is not a safetensors file"),
    "other.safetensors": (safetensors({"weights": U16}, bytes(18)), "has no tensor named tokens"),
    "float.safetensors": (safetensors({"tokens": {**U16, "dtype": "F16"}}, bytes(18)), "not one row of whole numbers"),
    "words.txt": (b"text", "is no file of token ids"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, name):
    data, problem = BROKEN[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RungError, match=problem) as refused:
        open_token_file(tmp_path / name, VOCABULARY)
    assert name in refused.value.problem
    assert "\n" not in refused.value.problem + refused.value.hint
    assert refused.value.hint


def test_a_missing_file_a_folder_and_a_needless_type_are_refused(tmp_path):
    with pytest.raises(RungError, match=r"missing\.bin is not there"):
        open_token_file(tmp_path / "missing.bin", VOCABULARY)
    with pytest.raises(RungError, match="is a folder"):
        open_token_file(tmp_path, VOCABULARY)
    with pytest.raises(RungError, match="says itself"):
        open_token_file(write(tmp_path / "a.npy"), VOCABULARY, "uint16")


# The vocabulary


def looked_into(file: TokenFile, vocab_size: int = VOCABULARY, end_id: int = 7):
    return look_into(file, vocab_size, end_id, np.arange(vocab_size, dtype=np.int32))


def test_a_small_file_is_looked_through_whole(tmp_path):
    sample = looked_into(open_token_file(write(tmp_path / "a.bin"), VOCABULARY))
    assert (sample.tokens, sample.whole) == (len(IDS), True)
    assert sample.ends == (IDS == 7).sum()
    assert sample.text_bytes == IDS.sum()  # an id stands for as many bytes as it is high


@pytest.mark.parametrize(
    ("name", "dtype", "wrong"),
    [
        ("a.bin", "<u2", 300),
        ("a.npy", "<i8", -1),
        ("a.npy", "<i8", 2**32 + 5),  # which 32 bits would make a 5
        ("a.npy", "<u8", 2**64 - 1),
        ("a.safetensors", "<u4", 2**31 + 5),  # which would be negative
    ],
)
def test_an_id_that_no_vocabulary_has_is_named_with_file_and_position(tmp_path, name, dtype, wrong):
    ids = IDS.astype(dtype)
    ids[4321] = wrong
    with pytest.raises(RungError, match=rf"{name}: token 4,321 has the token id {wrong}, .* is 300"):
        looked_into(open_token_file(write(tmp_path / name, ids, dtype), VOCABULARY))


def test_a_bin_of_another_type_is_told_from_one_of_this(tmp_path):
    path = write(tmp_path / "a.bin", dtype="<u4")
    with pytest.raises(RungError, match="every second uint16 is 0") as refused:
        looked_into(open_token_file(path, VOCABULARY))
    assert "--dtype uint32" in refused.value.hint
    with pytest.raises(RungError, match="which the vocabulary of 70,000 does not fit"):
        open_token_file(path, 70_000)
    looked_into(open_token_file(path, 70_000, "uint32"), 70_000)
    with pytest.raises(RungError, match="token 0 has the token id"):  # two ids of 16 bits taken for one of 32
        looked_into(open_token_file(write(tmp_path / "b.bin", IDS + 1), VOCABULARY + 1, "uint32"), VOCABULARY + 1)
    # A text of nothing but zeros is no sign of anything.
    assert looked_into(open_token_file(write(tmp_path / "c.bin", np.zeros(50)), VOCABULARY)).tokens == 50


def test_samples_of_a_large_file_reach_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("rung.tokens.files.WHOLE_BYTES", 1000)
    monkeypatch.setattr("rung.tokens.files.SAMPLE_BYTES", 20)
    for position in (0, 9, len(IDS) - 10, len(IDS) - 1):
        ids = IDS.copy()
        ids[position] = 999
        with pytest.raises(RungError, match=f"token {position:,} has"):
            looked_into(open_token_file(write(tmp_path / "a.bin", ids), VOCABULARY))
    sample = looked_into(open_token_file(write(tmp_path / "a.bin"), VOCABULARY))
    assert (sample.tokens, sample.whole) == (650, False)
    unseen = IDS.copy()
    unseen[40] = 999
    looked_into(open_token_file(write(tmp_path / "a.bin", unseen), VOCABULARY))  # between two samples


@given(st.lists(st.integers(0, 19), min_size=1), st.integers(0, 100))
def test_counts_of_ids_are_those_of_counting(ids, first):
    counts = count_ids("file", np.array(ids, np.uint16), first, 20)
    assert counts.tolist() == [ids.count(token) for token in range(20)]


def test_numpys_own_writer_of_the_second_version_is_read(tmp_path):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, IDS.astype("<u2"), version=(2, 0))
    (tmp_path / "a.npy").write_bytes(buffer.getvalue())
    np.testing.assert_array_equal(open_token_file(tmp_path / "a.npy", VOCABULARY).ids(), IDS)
