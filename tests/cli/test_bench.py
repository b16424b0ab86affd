"""``rung bench``: a sweep is timed on no text; what does not run is a row with its reason; the peak of known GPUs."""

from __future__ import annotations

import pytest

from rung.run import bench as module
from rung.run.peak import Peak, data_sheet

SMALL = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--model.context-length", "16", "--vocab-size", "300", "--train.optimizer", "adamw", "--rounds", "2"),
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rounds of a step or two, and a peak that is known."""
    monkeypatch.setattr(module, "_ROUND_SECONDS", 1e-3)
    monkeypatch.setattr(module, "peak_of", lambda device, dtype, precision: Peak(1e9, f"assumed for {precision}"))


def test_a_sweep_has_a_row_for_each_batch_and_attention_and_the_reason_of_what_fails(rung, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 2**26)
    done = rung("bench", *SMALL, "--batch", "4,100000", "--attention", "blocked,cudnn", "--json")
    assert done.status == 0, done.err
    result = done.json
    rows = {(row["attention"], row["batch"]): row for row in result["rows"]}
    assert list(rows) == [("blocked", 4), ("blocked", 100_000), ("cudnn", 4), ("cudnn", 100_000)]
    row = rows["blocked", 4]
    assert row["backend"] == "blocked"
    assert row["failed"] == ""
    middle, low, high = row["tokens_per_second"]
    assert 0 < low <= middle <= high
    fastest = row["step_seconds"][1]
    assert high * fastest == pytest.approx(4 * 16)  # tokens of a step
    assert row["mfu"] == pytest.approx(middle * result["flops_per_token"] / 1e9)
    # The state: weights and two means of AdamW, float32; the step needs no more than a few times that.
    assert 3 * 4 * result["parameters"] < row["planned_bytes"] < 40 * 4 * result["parameters"]
    assert row["compile_seconds"] > 0
    assert rows["blocked", 100_000]["failed"].endswith(", and 64 MiB are free")
    assert rows["blocked", 100_000]["tokens_per_second"] is None
    assert "cudnn" in rows["cudnn", 4]["failed"]
    assert result["peak_source"] == "assumed for float32"


def test_the_count_of_operations_and_parameters_is_by_hand(rung):
    result = rung("bench", *SMALL, "--model.tied", "false", "--attention", "splash,cudnn", "--json").json
    hidden = 4 * 32 * 32 + 2 * 32 * 64  # queries, keys, values, output; the MLP
    norms_and_more = result["parameters"] - hidden - 2 * 300 * 32
    assert 0 < norms_and_more < 300
    assert result["flops_per_token"] == 6 * (hidden + 300 * 32) + 12 * 32 * 16


def test_the_table_says_what_was_used_and_what_failed(rung):
    done = rung("bench", *SMALL, "--batch", "2", "--attention", "auto,cudnn", "--dtype", "bfloat16")
    assert done.status == 0, done.err
    lines = done.text.splitlines()
    assert "bfloat16" in lines[0]
    assert "(assumed for bfloat16)" in lines[1]
    head = next(line for line in lines if line.startswith("attention"))
    row = lines[lines.index(head) + 1].split()
    assert row[:3] == ["auto:", "blocked", "2"]
    assert lines[-1].startswith("cudnn, batch 2: ")


def test_out_of_memory_while_it_runs_is_a_row_too(rung, monkeypatch):
    measured = module._measured

    def fail(config, row, *rest):
        if row.batch == 4:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore")
        return measured(config, row, *rest)

    monkeypatch.setattr(module, "_measured", fail)
    rows = rung("bench", *SMALL, "--batch", "4,2", "--json").json["rows"]
    assert [row["failed"] for row in rows] == ["RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.", ""]


def test_nothing_that_runs_is_a_failure(rung):
    done = rung("bench", *SMALL, "--batch", "2,4", "--attention", "splash")
    assert done.status == 1
    assert "splash, batch 4: " in done.text


def test_the_only_point_that_cannot_be_is_the_users_mistake(rung):
    done = rung("bench", *SMALL, "--batch", "2", "--attention", "splash")
    assert done.status == 2
    assert "\nhint: " in done.err
    # The config's own way is not computed where others are asked for.
    assert rung("bench", *SMALL, "--batch", "2", "--compute.attention", "cudnn", "--attention", "blocked").status == 0


def test_an_interrupt_leaves_the_points_that_are_done(rung, monkeypatch):
    measured = module._measured

    def interrupt(config, row, *rest):
        if row.batch == 4:
            raise KeyboardInterrupt
        return measured(config, row, *rest)

    monkeypatch.setattr(module, "_measured", interrupt)
    done = rung("bench", *SMALL, "--batch", "2,4")
    assert done.status == 1
    assert "interrupted" in done.err
    assert done.text.splitlines()[-1].startswith("auto: blocked")


def test_devices_of_one_processor_share_its_peak(rung):
    both = [rung("bench", *SMALL, "--batch", "4", "--mesh", f"data={n}", "--json").json for n in (1, 2)]
    for result in both:
        expected = result["rows"][0]["tokens_per_second"][0] * result["flops_per_token"] / 1e9
        assert result["rows"][0]["mfu"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "0"), "--batch is 0"),
        (("--batch", "4,x"), "not a whole number"),
        (("--batch", "99999999999"), "--batch is 99999999999"),
        (("--batch=",), "--batch is ''"),
        (("--rounds", "none"), "not a whole number"),
        (("--attention", "flash"), "--attention is 'flash'"),
        (("--model.n-heads", "5"), "not divisible by model.n_heads 5"),
    ],
)
def test_mistakes_are_two_lines(rung, words, said):
    done = rung("bench", *SMALL, *words)
    assert done.status == 2
    assert said in done.err
    assert "hint: " in done.err


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", "bfloat16", 756),
        ("NVIDIA H100 NVL", "float32", "tensorfloat32", 417),
        ("NVIDIA H200", "float32", "float32", 67),
        ("NVIDIA GH200 480GB", "bfloat16", "bfloat16", 990),
        ("NVIDIA A100-SXM4-80GB", "float32", "tensorfloat32", 156),
        ("NVIDIA A100-SXM4-80GB", "float32", "bfloat16", 156),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", "bfloat16", None),
        ("NVIDIA L4", "float32", "float32", 30.3),
        ("NVIDIA L40S", "bfloat16", "bfloat16", 362),
        ("NVIDIA GeForce RTX 3090", "bfloat16", "bfloat16", 71),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", "bfloat16", None),
        ("TPU v5 lite", "bfloat16", "bfloat16", None),
        ("cpu", "float32", "float32", None),
    ],
)
def test_the_peak_of_a_gpu_is_its_data_sheets_dense_rate(kind, dtype, precision, teraflops):
    found = data_sheet(kind, dtype, precision)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))
