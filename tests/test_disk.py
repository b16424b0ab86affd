import pytest

from rung.disk import whole_file


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "report.html"
    path.write_bytes(b"old")

    def fail_midway():
        with whole_file(path) as file:
            file.write(b"new")
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail_midway()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "report.html"
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
