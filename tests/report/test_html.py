import html.parser
import json
import math
import re

import pytest

from rung import config
from rung.errors import RungError
from rung.report.html import MOST_SAMPLES, write_report
from rung.report.metrics import MetricsLog
from rung.report.tables import config_table, environment_table, grouped
from rung.train.events import Hardware, Norms, Resumed, SaveFailed, Skipped, Spiked

VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}
PARAMETERS = [
    ("embedding", (300, 128), 38_400, True),
    *((f"blocks.{n}.mlp.up", (512, 128), 65_536, True) for n in range(12)),
    ("norm.scale", (128,), 128, False),
]


class Page(html.parser.HTMLParser):
    """A page as its tree of open elements: fails where an element is closed that is not the innermost open one."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.texts.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)

    @property
    def text(self):
        return "".join(self.texts)


def report(run, parameters=PARAMETERS):
    path = write_report(run, parameters)
    assert path == run / "report.html"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    return Page(path.read_text(encoding="utf-8"))


def assert_self_contained(run, page):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)^// .*$", "", text))
    assert "@import" not in text
    assert "url(" not in text
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert page.count("link") == page.count("iframe") == page.count("img") == 0


@pytest.mark.parametrize(
    ("steps", "validate"), [(0, False), (1, False), (1, True), (2, True), (100, False), (100, True)]
)
def test_runs_of_every_length_are_well_formed_and_self_contained(write_run, steps, validate):
    run = write_run(steps, validate=validate)
    page = report(run)
    assert_self_contained(run, page)
    assert "a-run" in page.text
    if not validate:
        assert "no validation" in page.text


def test_a_long_run_is_thinned_and_keeps_its_spike(write_run):
    run = write_run(30_000, samples=(), skip=(12_345,))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (spike,) = [n for n, line in enumerate(lines) if '"step": 20001,' in line]
    lines[spike] = re.sub(r'"loss": [\d.]+', '"loss": 77.125', lines[spike])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = report(run)
    assert (run / "report.html").stat().st_size < 2_000_000
    text = (run / "report.html").read_text()
    assert "77.125" in text
    for path in re.findall(r'<path class="(?:train|plain)[^"]*" d="([^"]*)"', text):
        assert path.count("L") < 2000
    assert "update of step 12,345 skipped" in page.text


def test_samples_are_escaped_and_their_control_characters_spelled(write_run, nasty):
    run = write_run(10, name="<u>name</u>")
    page = report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    scripts = page.count("script")
    assert "<script>alert" not in text
    assert "<u>" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    spelled = r"""<script>alert('x')</script> & "quoted" \x1b[31m\x00\x9b\x0d ]]> --> 国境の長いトンネル"""
    assert f"{spelled} \u202eمرحبا \\xdc80" in page.text
    assert "Once <upon> & " in page.text
    assert report(write_run(10, samples=("plain",))).count("script") == scripts


def test_many_samples_are_chosen_evenly_and_the_count_is_said(write_run):
    run = write_run(5, samples=[f"sample number {n}." for n in range(10)])
    page = report(run)
    assert f"{MOST_SAMPLES} of 50 samples" in page.text
    assert page.text.count("sample number") == MOST_SAMPLES


def test_what_could_not_be_read_is_said(write_run):
    run = write_run(10)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"event": "st')
    (run / "environment.json").write_text("{")
    (run / "lineage.json").write_text("[]")
    page = report(run)
    assert "metrics.jsonl: its last line" in page.text
    assert "environment.json" in page.text
    assert "lineage.json: is not one JSON object" in page.text
    assert "Lineage" not in page.text


def test_a_run_with_everything_is_well_formed_and_self_contained(write_run, make_step, nasty):
    run = write_run(50, skip=(7,))
    lineage = {"run": f"../{nasty}", "step": 12_000, "weights": "ab" * 32, "optimizer": "kept", "parents": []}
    (run / "lineage.json").write_text(json.dumps(lineage))
    gpus = [{"name": nasty, "utilization": 97, "throttled": nasty}, {}]
    with MetricsLog(run / "metrics.jsonl") as log:
        for event in (
            Spiked(20, math.inf, 4.5),
            SaveFailed(20, nasty, None),
            Skipped(21, 1, nasty, [1], nasty),
            *(Norms(step, {nasty: 1.0 * step, "b": math.nan}, {nasty: 0.1}) for step in (10, 20)),
            *(Hardware(step, 1.0, 50.0, 80.0, 1 << 30, None, gpus) for step in (10, 20)),
            Resumed(20, [f"name {nasty} -> b"]),
        ):
            log(event)
    page = report(run)
    assert_self_contained(run, page)
    assert "Started from ../<script>" in page.text
    assert "at step 12,000, optimizer kept" in page.text
    for title in ("Update-to-weight ratio", "GPU use", "Lineage"):
        assert title in page.text
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_headline_numbers_are_the_best_validation(write_run):
    run = write_run(10)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (best,) = [n for n, line in enumerate(lines) if '"evaluation", "step": 6,' in line]
    lines[best] = re.sub(r'"loss": [\d.]+', '"loss": 1.125', lines[best])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    numbers = re.search(r'<dl class="numbers">(.*?)</dl>', write_report(run).read_text(), re.DOTALL)[1]
    assert "1.125" in numbers
    assert "best, at step 6; last" in numbers
    assert "40,000" in numbers
    assert "40 GFLOP/s achieved" in numbers


@pytest.mark.parametrize(("steps", "said"), [(300, 100), (100, 99), (1, None)])
def test_the_training_loss_is_the_mean_of_the_last_hundred_applied_steps(write_run, steps, said):
    run = write_run(steps, samples=(), skip=(steps,))
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step" and not event["skipped"]]
    value, detail = headline(run, "Training loss")
    if said is None:
        assert (value, detail) == ("–", "no step was applied")
    else:
        assert (value, detail) == (f"{sum(losses[-100:]) / said:.3f}", f"mean of the last {said} steps")


def test_the_training_loss_of_a_thin_log_says_so(write_run):
    run = write_run(300, samples=())
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("log_every_steps = 1\n", "log_every_steps = 10\n"))
    assert headline(run, "Training loss")[1] == "mean of the last 10 logged steps"


def headline(run, name):
    report = write_report(run).read_text()
    found = re.search(rf'<dt>{name}</dt><dd><span class="value">(.*?)</span><span class="detail">(.*?)</span>', report)
    return found.groups()


def test_what_the_run_filled_in_is_not_marked_as_changed():
    changes = {
        "tokenizer.kind": "char", "model.vocab_size": 65, "model.norm": "rmsnorm", "train.steps": 60,
        "train.norms_every_steps": 1, "evaluate.every_steps": 6, "sample.every_steps": 6, "checkpoint.every_steps": 7,
    }  # fmt: skip
    table = config_table(config.resolve(config.override(config.Config(), changes)))
    sections = {section.partition("<")[0]: section for section in table.split("<h3>")}

    def row(section, name):
        return re.search(rf"<tr( class=changed)?[^>]*><th><code>{name}</code>.*?</tr>", sections[section])

    for section, name in [
        ("model", "vocab_size"),
        ("train", "norms_every_steps"),
        ("evaluate", "every_steps"),
        ("sample", "every_steps"),
    ]:
        assert row(section, name)[1] is None
        assert "derived" in row(section, name)[0]
    assert row("checkpoint", "every_steps")[1]
    assert "default: with every validation" in row("checkpoint", "every_steps")[0]
    assert "default: from tokens or epochs" in row("train", "steps")[0]
    assert "default: layernorm" in row("model", "norm")[0]
    assert row("model", "norm_bias") is None  # RMSNorm has none
    assert row("model", "rope_base") is None
    assert row("model", "init_std")
    assert row("track", "wandb_project") is None  # it is not written to
    assert re.sub("<[^>]*>", " ", row("mesh", "data")[0]).split() == ["data", "1", "device"]


def test_versions_that_are_empty_are_left_out():
    table = environment_table({"jax": "0.10.2", "xla_flags": "", "device": {"kind": None, "count": 0}})
    assert re.findall("<th>(.*?)</th>", table) == ["jax", "device.count"]


def test_tables_show_weights_settings_events_and_versions(write_run):
    run = write_run(10, skip=(4,))
    text = report(run).text
    assert "blocks.0-11.mlp.up" in text
    assert f"{38_400 + 12 * 65_536 + 128:,}" in text
    assert "stopping: <time> is up" in text
    assert "skipped the gradient is not finite" in text
    assert "device.kind" in text
    source = (run / "report.html").read_text()
    changed = re.findall(r"<tr class=changed[^>]*><th><code>(\w+)</code>", source)
    assert changed == ["name", "d_model"]  # and not d_head, which follows from d_model
    assert "default: 256" in source


def test_alike_weights_share_a_row():
    rows = grouped(
        [
            ("a.0.w", (2,), 2, True),
            ("a.1.w", (2,), 2, True),
            ("a.2.w", (3,), 3, True),
            ("a.0.b", (2,), 2, False),
            ("h2.w", (), 1, True),
        ]
    )
    assert rows == [
        ("a.0-1.w", (2,), 2, 4, True),
        ("a.2.w", (3,), 1, 3, True),
        ("a.0.b", (2,), 1, 2, False),
        ("h2.w", (), 1, 1, True),
    ]


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(RungError, match="no config file"):
        write_report(tmp_path)
