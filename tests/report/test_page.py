"""The page stands alone, shows what the summary says, and cannot be broken by a name."""

from __future__ import annotations

import errno
import html
import json
import math
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from overnight.errors import ConfigError, DataError, UserError
from overnight.report.page import write_report
from overnight.report.summary import duration, share, summarize
from overnight.run_dir import atomic
from tests.report.sample import byte_metrics, byte_settings, finetunings, measured, metrics, settings, write_run

SEEDS = finetunings([0.671, 0.665, 0.679], [0.502, 0.497, 0.508])


class Page(HTMLParser):
    """Elements, visible text, scripts and figures, by their captions, of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        text = path.read_text(encoding="utf-8")
        self.feed(text)
        found = re.findall(r'<figcaption>(.*?)</figcaption>.*?<script type="application/json">(.*?)</script>', text, re.DOTALL)
        self.figures: dict[str, Any] = {re.sub("<.*?>", "", caption).strip(): json.loads(figure) for caption, figure in found}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script" and not attrs:
            self.scripts.append("")
        if tag not in ("meta", "link", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if not data.startswith("{"):
                self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data

    def curve(self, caption: str, name: str = "training") -> dict[str, Any]:
        """The named trace of a figure."""
        return next(trace for trace in self.figures[caption]["data"] if trace["name"] == name)


def test_the_page_asks_nothing_of_any_other_place(tmp_path: Path) -> None:
    page = Page(write_report([write_run(tmp_path / "run", metrics() + SEEDS)], tmp_path / "report.html"))
    places = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "srcset", "action", "data")
    ]
    assert places == ["data:,"]
    assert len(page.scripts) == 2
    own = page.scripts[1] + (tmp_path / "report.html").read_text(encoding="utf-8").split("</style>")[0]
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", own)


def test_plotly_is_inlined_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, metrics(), settings(name)) for name in ("a", "b")]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert [len(script) > 1_000_000 for script in page.scripts] == [True, False]


def test_the_page_shows_what_the_summary_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), *SEEDS, {"kind": "event", "event": "resumed", "global_step": 120}])
    found, page = summarize(folder), Page(write_report([folder], tmp_path / "report.html"))
    for row in found["phases"]:
        assert row["name"] in page.text
        assert share(row["mlm_accuracy"]) in page.text and share(row["nsp_accuracy"]) in page.text and duration(row["seconds"]) in page.text
    task = found["tasks"][0]
    for init in ("pretrained", "random"):
        assert all(share(value) in page.text for value in task[init]["values"].values())
    assert task["verdict"] in page.text and "word overlap" in page.text
    assert found["device"] in page.text
    assert "phases.short.optim.lr" in page.text and "cpu.flags" in page.text
    assert "step 120: resumed" in page.text
    assert "Incomplete" not in page.text


def test_the_curves_are_the_measured_ones_by_step_and_by_time(tmp_path: Path) -> None:
    lines = metrics()
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    shown = {
        "mlm_loss": "Masked-LM loss nats",
        "nsp_loss": "NSP loss nats",
        "lr": "Learning rate",
        "grad_norm": "Gradient norm before clipping",
    }
    shown |= {"tokens_per_s": "Throughput tokens/s", "mlm_accuracy": "Masked-LM accuracy %, validation"}
    for key, caption in shown.items():
        for kind, name in (("train", "training"), ("eval", "validation")):
            mine = [line for line in lines if line["kind"] == kind and key in line]
            if mine:
                curve, scale = page.curve(caption, name), 100 if key == "mlm_accuracy" else 1
                assert curve["x"] == [line["global_step"] for line in mine]
                # The run takes 225 seconds, which are shown as minutes.
                assert curve["meta"] == pytest.approx([line["seconds"] / 60 for line in mine], abs=1e-4)
                assert curve["y"] == [scale * line[key] for line in mine]
    layout = page.figures["Learning rate"]["layout"]
    for phases, end in ((layout, 200), (layout["meta"], next(x["seconds"] for x in lines if x.get("global_step") == 200) / 60)):
        assert [(name["text"], name["x"]) for name in phases["annotations"]] == [("short", 0), ("long", pytest.approx(end, rel=0.01))]
    assert (layout["xaxis"]["tickprefix"], layout["meta"]["xaxis"]["ticksuffix"]) == ("step ", " min")


def test_a_run_without_nsp_has_one_loss_which_is_that_of_the_masked_words(tmp_path: Path) -> None:
    lines = [{key: value for key, value in line.items() if key != "mlm_loss" or line["kind"] == "eval"} for line in metrics(nsp=False)]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    assert page.curve("Masked-LM loss nats")["y"] == [line["loss"] for line in lines if line["kind"] == "train"]
    assert not any(caption.startswith("NSP") for caption in page.figures)
    assert "NSP" not in page.text


def test_a_byte_model_shows_bits_per_byte_and_nothing_of_bert(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", byte_metrics(), byte_settings())
    (row,) = summarize(folder)["phases"]
    page = Page(write_report([folder], tmp_path / "report.html"))
    assert page.text.count(f"{row['bits_per_byte']:.3f}") == 2 and page.text.count(share(row["byte_accuracy"])) == 2  # card and table
    assert (
        "Bits per byte" in page.text and "Bits per character" not in page.text and "Masked-LM" not in page.text and "NSP" not in page.text
    )
    bits = [page.curve("Bits per byte", name)["y"] for name in ("training", "validation")]
    assert [len(values) for values in bits] == [12, 3] and bits[1][-1] == pytest.approx(row["bits_per_byte"])
    assert "Masked-LM loss nats" not in page.figures


def test_beside_bert_a_byte_model_has_columns_of_its_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", metrics()), write_run(tmp_path / "b", byte_metrics(), byte_settings())]
    page = Page(write_report(folders, tmp_path / "report.html"))
    assert "Masked-LM loss" in page.text and "Bits per byte" in page.text
    page_html = (tmp_path / "report.html").read_text(encoding="utf-8").split("<h2>Pretraining</h2>")[1].split("</table>")[0]
    head, *rows = page_html.split("<tr")[1:]
    assert [row.count("<td") + row.count("<th>") for row in rows] == [head.count("<th")] * 3


def test_only_a_run_that_measured_tensors_has_a_section_for_them(tmp_path: Path) -> None:
    for name, lines in (("with", measured()), ("without", [])):
        page = Page(write_report([write_run(tmp_path / name, [*metrics(), *lines])], tmp_path / f"{name}.html"))
        assert ("Every tensor of the network" in page.text) == (name == "with")


def test_what_a_run_measured_of_itself_is_drawn(tmp_path: Path) -> None:
    own = {"mfu": 0.31, "memory_gb": 1.2, "data_wait_fraction": 0.02, "loss_scale": 65536.0, "skipped": 1}
    lines = [{**line, **own} if line["kind"] == "train" else line for line in metrics()]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    shown = {"Model FLOP utilization % of the peak": 31.0, "Memory GB": 1.2, "Waiting for data % of the time": 2.0}
    for caption, value in (shown | {"Loss scale fp16": 65536.0, "Skipped steps so far": 1}).items():
        assert page.curve(caption)["y"] == [value] * 50
    assert "31.0 %" in page.text
    rare = {"data_wait_fraction": 0.004, "skipped": 0}
    lines = [{**line, **rare} if line["kind"] == "train" else line for line in metrics()]
    page = Page(write_report([write_run(tmp_path / "old", lines)], tmp_path / "old.html"))
    assert not {"Model FLOP utilization % of the peak", "Waiting for data % of the time", "Skipped steps so far"} & set(page.figures)


def test_events_are_marked_where_they_happened_and_checkpoints_are_counted(tmp_path: Path) -> None:
    lines = metrics()
    at = {line["global_step"]: line["seconds"] for line in lines if line["kind"] == "train"}
    lines += [
        {"kind": "event", "event": "resumed", "global_step": 120, "seconds": 95.5},
        {"kind": "event", "event": "skipped", "global_step": 123, "message": "a loss that is no number"},
        {"kind": "event", "event": "checkpoint_fell_back", "global_step": 0, "message": "cut"},
        {"kind": "event", "event": "without a step"},
        *(
            {"kind": "event", "event": "checkpoint_saved", "global_step": step, "seconds": 1.0, "save_seconds": 0.25}
            for step in (50, 100, 150)
        ),
    ]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    (events,) = page.figures["Events also the short marks in the other charts"]["data"]
    found = {what: at for what, *at in zip(*(events[key] for key in ("y", "x", "meta", "text")), strict=True)}
    assert found["resumed"] == [120, pytest.approx(95.5 / 60, abs=1e-4), "resumed"]
    assert found["skipped"] == [123, pytest.approx(at[120] / 60, abs=1e-4), "skipped: a loss that is no number"]
    assert found["checkpoint fell back"][1] == 0.0 and "without a step" not in found
    assert len(events["x"]) == 6
    # A saved checkpoint is no mark in the other charts.
    marks = [shape["x0"] for shape in page.figures["Learning rate"]["layout"]["shapes"] if shape["y1"] < 1]
    assert sorted(marks) == [0, 120, 123]
    assert "3 checkpoints saved; training paused for 0.8 s" in page.text and "step 50: checkpoint saved" not in page.text
    assert "without a step" in page.text


def test_measured_tensors_have_a_section_of_their_own(tmp_path: Path) -> None:
    plain = Page(write_report([write_run(tmp_path / "plain", metrics())], tmp_path / "plain.html"))
    drawn = {caption.split(",")[0] for caption in plain.figures}
    assert "Trust ratio" not in plain.text and not drawn & {
        "Update over weight",
        "Gradient noise scale sequences; dotted: the batch; a gap: unknown",
    }
    runs = [write_run(tmp_path / name, [*metrics(), *measured()], settings(name)) for name in ("a", "b")]
    page = Page(write_report([*runs, tmp_path / "plain"], tmp_path / "report.html"))
    ratios = [caption for caption in page.figures if caption.startswith("Trust ratio")]
    assert "The trust ratio is" in page.text and [caption.split()[2] for caption in ratios] == ["a", "b"]
    (map,) = page.figures[ratios[0]]["data"]
    assert map["y"] == ["encoder.word.weight", "encoder.layers.0.up.weight"] and map["customdata"][1][0] == 0.0247
    assert map["z"][1][0] == pytest.approx(math.log10(0.0247), abs=1e-3) and len(map["x"]) == len(map["meta"]) == 20
    assert page.curve("Gradient noise scale sequences; dotted: the batch; a gap: unknown", "a, batch")["y"] == [64] * 20
    assert page.text.count("times the fewest steps") == 2


def test_many_tensors_have_labels_of_their_layers_that_do_not_overlap(tmp_path: Path) -> None:
    names = [f"encoder.layers.{layer}.t{number}.weight" for layer in range(24) for number in range(8)]
    lines = [
        {**line, "tensor_norms": {name: [1.0, 1.0, 0.1, 0.5] for name in names}} for line in measured() if line["kind"] == "tensor_norms"
    ]
    page = Page(write_report([write_run(tmp_path / "run", [*metrics(), *lines])], tmp_path / "report.html"))
    axis = page.figures["Trust ratio of the tensors that are adapted"]["layout"]["yaxis"]
    assert axis["ticktext"] == [f"encoder.layers.{layer}" for layer in range(24)]
    assert axis["tickvals"] == pytest.approx([8 * layer + 3.6 for layer in range(24)])


def test_the_values_of_a_unit_are_counted_by_class_in_a_figure(tmp_path: Path) -> None:
    unit = {
        "of": "cell",
        "number": 7,
        "threshold": 0.1,
        "above": "pos",
        "histogram": {"edges": [0, 1, 2], "counts": {"neg": [3, 1], "pos": [0, 4]}},
    }
    scores = {
        "metric": "accuracy",
        "value": 0.9,
        "metrics": {"accuracy": 0.9, "accuracy of the unit alone": 0.8, "accuracy without it": 0.7},
    }
    line = {"kind": "linear_probe", "name": "mine", "task": "csv", "seed": 0, "init": "pretrained", "rows": 9, **scores, "unit": unit}
    page = Page(write_report([write_run(tmp_path / "run", [*byte_metrics(), line], byte_settings())], tmp_path / "report.html"))
    (figure,) = (figure for caption, figure in page.figures.items() if caption.startswith("cell 7 is the most informative: 80.0 % alone"))
    assert [(bars["name"], bars["x"], bars["y"]) for bars in figure["data"]] == [("neg", [0.5, 1.5], [3, 1]), ("pos", [0.5, 1.5], [0, 4])]


def test_a_diverged_run_leaves_gaps_in_its_curves(tmp_path: Path) -> None:
    bad = {"mlm_loss": float("nan"), "grad_norm": float("inf")}
    lines = [{**line, **bad} if line["kind"] == "train" and line["global_step"] > 100 else line for line in metrics()]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    for caption in ("Masked-LM loss nats", "Gradient norm before clipping"):
        values = page.curve(caption)["y"]
        assert None not in values[:20] and values[20:] == [None] * 30


def test_several_runs_lie_over_each_other_by_name_and_show_what_differs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", metrics() + SEEDS), write_run(tmp_path / "b", metrics(0.3), settings("wide", seed=7))]
    page = Page(write_report(runs, tmp_path / "report.html"))
    curves = page.figures["Masked-LM loss nats"]["data"]
    assert [(curve["name"], curve["legendgroup"]) for curve in curves] == [
        (f"{run}, {what}", run) for run in ("demo", "wide") for what in ("training", "validation")
    ]
    assert [attributes["data-series"] for _, attributes in page.tags if "data-series" in attributes] == ["demo", "wide"]
    assert {curve["line"]["color"] for curve in curves[:2]} != {curve["line"]["color"] for curve in curves[2:]}
    assert "What differs" in page.text and "seed" in page.text
    assert "wide: docnames pretrained: seed 0, 1, 2 not run yet" in page.text
    assert "wide: not run yet" in " ".join(page.text.split())


def test_a_task_of_several_runs_has_a_column_for_every_seed_and_one_scale_for_all_of_them(tmp_path: Path) -> None:
    low, high = finetunings([0.60, 0.62], [0.60]), finetunings([0.80, float("nan"), 0.84], [])
    runs = [write_run(tmp_path / name, metrics() + lines, settings(name)) for name, lines in (("a", low), ("b", high), ("c", []))]
    page = write_report(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r">Seed (\d)<", page) == ["0", "1", "2"]
    assert all(f"<td>{share(value)}</td>" in page for value in (0.60, 0.62, 0.80, 0.84))
    places = [float(x) for x in re.findall(r'cx="([^"]*)"', page)]
    assert places == pytest.approx([6 + 148 * part for part in (0, 1 / 12, 0, 10 / 12, 1)], abs=0.1)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, metrics()) for name in ("a", "b")]
    curves = Page(write_report(runs, tmp_path / "report.html")).figures["Learning rate"]["data"]
    assert [curve["legendgroup"] for curve in curves] == [f"demo ({tmp_path / 'a'})", f"demo ({tmp_path / 'b'})"]


@pytest.mark.parametrize(
    "lines", [[], metrics()[:1], metrics()[:2], metrics()[:-5], metrics(nsp=False), SEEDS, finetunings([0.5], []), measured()]
)
def test_a_run_in_any_state_has_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    assert "Incomplete" in page.text
    assert page.open == []


def test_a_folder_whose_name_is_no_utf_8_has_a_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [*metrics(), *measured()]) for name in ("\udcff", "\udcfe")]
    page = Page(write_report(runs, tmp_path / "\udcfd.html"))
    assert f"demo ({tmp_path}/\\udcff)" in page.text
    assert page.curve("Learning rate", f"demo ({tmp_path}/\udcff), training")["y"]


def test_names_and_messages_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script>'
    lines = [{**line, "phase": evil} if "phase" in line else line for line in metrics()]
    lines += [{**line, "name": evil} for line in SEEDS] + [{"kind": "event", "event": evil, "message": evil}]
    page = Page(write_report([write_run(tmp_path / "run", lines, settings(evil))], tmp_path / "report.html"))
    assert len(page.scripts) == 2
    layout = page.figures["Learning rate"]["layout"]
    assert layout["annotations"][0]["text"] == html.escape(evil, quote=False), "plotly reads tags"


def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    lines = [{"kind": "train", "phase": "short", "step": i, "global_step": i, "seconds": i / 2, "loss": 1.0} for i in range(1, 7001)]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    assert len(page.curve("Masked-LM loss nats")["x"]) <= 3000
    assert "every 3rd logged line" in page.text


def test_no_run_the_same_run_twice_and_a_folder_as_target_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics())
    with pytest.raises(ConfigError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="named twice"):
        write_report([folder, tmp_path / "x" / ".." / "run"], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([folder], tmp_path)
    with pytest.raises(DataError, match="no such run folder"):
        write_report([tmp_path / "absent"], tmp_path / "report.html")


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSPC, "No space left on device; make room"), (errno.EROFS, "Read-only file system; name another file by --to")],
)
def test_a_page_that_cannot_be_written_says_what_to_do_and_leaves_the_older_one_whole(
    code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_run(tmp_path / "run", metrics()), tmp_path / "out" / "report.html"
    write_report([folder], out)
    before = out.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(UserError, match=rf"^{out} could not be written: {said}"):
        write_report([folder], out)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_without_plotly_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", metrics())
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'overnight\[report\]'"):
        write_report([folder], tmp_path / "report.html")
