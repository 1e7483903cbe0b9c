"""The page stands alone, shows what the summary says, and cannot be broken by a name."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from overnight.errors import ConfigError, DataError, UserError
from overnight.report.page import write_report
from overnight.report.summary import duration, share, summarise
from overnight.run_dir import atomic
from tests.report.sample import byte_metrics, byte_settings, finetunings, measured, metrics, settings, write_run

SEEDS = finetunings([0.671, 0.665, 0.679], [0.502, 0.497, 0.508])


class Page(HTMLParser):
    """Elements, visible text and embedded curves of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.curves: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data


def test_the_page_asks_nothing_of_any_other_place(tmp_path: Path) -> None:
    page = Page(write_report([write_run(tmp_path / "run", metrics() + SEEDS)], tmp_path / "report.html"))
    places = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "srcset", "action", "data")
    ]
    assert places == ["data:,"]
    assert len(page.scripts) == 3
    own = page.scripts[2] + (tmp_path / "report.html").read_text(encoding="utf-8").split("</style>")[0]
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", own)


def test_plotly_is_inlined_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, metrics(), settings(name)) for name in ("a", "b")]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert [len(script) > 1_000_000 for script in page.scripts] == [False, True, False]


def test_the_page_shows_what_the_summary_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), *SEEDS, {"kind": "event", "what": "resumed", "global_step": 120}])
    found, page = summarise(folder), Page(write_report([folder], tmp_path / "report.html"))
    for row in found["phases"]:
        assert row["name"] in page.text
        assert share(row["mlm_accuracy"]) in page.text and share(row["nsp_accuracy"]) in page.text and duration(row["seconds"]) in page.text
    task = found["tasks"][0]
    for init in ("pretrained", "scratch"):
        assert all(share(value) in page.text for value in task[init]["values"].values())
    assert task["verdict"] in page.text and "word overlap" in page.text
    assert found["device"] in page.text
    assert "phases.short.optim.lr" in page.text and "cpu.flags" in page.text
    assert "step 120: resumed" in page.text
    assert "Incomplete" not in page.text


def test_the_curves_are_the_measured_ones_by_step_and_by_time(tmp_path: Path) -> None:
    lines = metrics()
    run = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html")).curves["runs"][0]
    for kind, keys in (
        ("train", ("loss", "mlm_loss", "nsp_loss", "lr", "grad_norm", "tokens_per_s")),
        ("eval", ("mlm_loss", "mlm_accuracy", "nsp_accuracy")),
    ):
        mine = [line for line in lines if line["kind"] == kind]
        assert run[kind]["step"] == [line["global_step"] for line in mine]
        assert run[kind]["seconds"] == [line["seconds"] for line in mine]
        for key in keys:
            assert run[kind][key] == [line[key] for line in mine]
    assert [(phase["name"], phase["step"]) for phase in run["phases"]] == [("short", 0), ("long", 200)]


def test_a_byte_model_shows_bits_per_character_and_nothing_of_bert(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", byte_metrics(), byte_settings())
    (row,) = summarise(folder)["phases"]
    page = Page(write_report([folder], tmp_path / "report.html"))
    assert page.text.count(f"{row['bits_per_character']:.3f}") == 2 and page.text.count(share(row["byte_accuracy"])) == 2  # card and table
    assert "Bits per character" in page.text and "Masked-LM" not in page.text and "NSP" not in page.text
    (run,) = page.curves["runs"]
    assert len(run["train"]["byte_loss"]) == 12 and len(run["eval"]["byte_loss"]) == 3 and "mlm_loss" not in run["train"]


def test_beside_bert_a_byte_model_has_columns_of_its_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", metrics()), write_run(tmp_path / "b", byte_metrics(), byte_settings())]
    page = Page(write_report(folders, tmp_path / "report.html"))
    assert "Masked-LM loss" in page.text and "Bits per character" in page.text
    page_html = (tmp_path / "report.html").read_text(encoding="utf-8").split("<h2>Pretraining</h2>")[1].split("</table>")[0]
    head, *rows = page_html.split("<tr")[1:]
    assert [row.count("<td") + row.count("<th>") for row in rows] == [head.count("<th")] * 3


def test_only_a_run_that_measured_tensors_has_a_section_for_them(tmp_path: Path) -> None:
    for name, lines in (("with", measured()), ("without", [])):
        page = Page(write_report([write_run(tmp_path / name, [*metrics(), *lines])], tmp_path / f"{name}.html"))
        assert ("Every tensor of the network" in page.text) == (name == "with")


def test_what_a_run_measured_of_itself_is_drawn(tmp_path: Path) -> None:
    own = {"mfu": 0.31, "memory_gb": 1.2, "loader_wait": 0.002, "loss_scale": 65536.0, "skipped": 1}
    lines = [{**line, **own} if line["kind"] == "train" else line for line in metrics()]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    for key, value in own.items():
        assert page.curves["runs"][0]["train"][key] == [value] * 50
    assert "31.0 %" in page.text
    assert "mfu" not in Page(write_report([write_run(tmp_path / "old", metrics())], tmp_path / "old.html")).curves["runs"][0]["train"]


def test_events_are_marked_where_they_happened_and_checkpoints_are_counted(tmp_path: Path) -> None:
    lines = metrics()
    at = {line["global_step"]: line["seconds"] for line in lines if line["kind"] == "train"}
    lines += [
        {"kind": "event", "what": "resumed", "global_step": 120, "seconds": 95.5},
        {"kind": "event", "what": "skipped", "global_step": 123, "message": "a loss that is no number"},
        {"kind": "event", "what": "checkpoint fell back", "global_step": 0, "message": "cut"},
        {"kind": "event", "what": "without a step"},
        *({"kind": "event", "what": "saved", "global_step": step, "seconds": 1.0, "save_seconds": 0.25} for step in (50, 100, 150)),
    ]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    events = {event["what"]: event for event in page.curves["runs"][0]["events"]}
    assert events["resumed"] == {"what": "resumed", "step": 120, "seconds": 95.5, "message": ""}
    assert events["skipped"] == {"what": "skipped", "step": 123, "seconds": at[120], "message": "a loss that is no number"}
    assert events["checkpoint fell back"]["seconds"] == 0.0 and "without a step" not in events
    assert len(page.curves["runs"][0]["events"]) == 6
    assert "3 checkpoints saved; training stood still for 0.8 s" in page.text and "step 50: saved" not in page.text
    assert "without a step" in page.text


def test_measured_tensors_have_a_section_of_their_own(tmp_path: Path) -> None:
    plain = Page(write_report([write_run(tmp_path / "plain", metrics())], tmp_path / "plain.html"))
    assert "Trust ratio" not in plain.text and plain.curves["runs"][0]["tensors"] is None and plain.curves["runs"][0]["noise"] is None
    runs = [write_run(tmp_path / name, [*metrics(), *measured()], settings(name)) for name in ("a", "b")]
    page = Page(write_report([*runs, tmp_path / "plain"], tmp_path / "report.html"))
    assert "The trust ratio is" in page.text and ("div", {"class": "maps", "id": "maps"}) in page.tags
    assert [bool(run["tensors"]) for run in page.curves["runs"]] == [True, True, False]
    assert page.curves["runs"][0]["noise"]["batch"] == [64] * 20


def test_a_diverged_run_leaves_gaps_in_its_curves(tmp_path: Path) -> None:
    lines = [{**line, "loss": float("nan"), "grad_norm": float("inf")} if line["kind"] == "train" else line for line in metrics()]
    curves = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html")).curves["runs"][0]
    assert set(curves["train"]["loss"]) == {None} == set(curves["train"]["grad_norm"])


def test_several_runs_lie_over_each_other_by_name_and_show_what_differs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", metrics() + SEEDS), write_run(tmp_path / "b", metrics(0.3), settings("wide", seed=7))]
    page = Page(write_report(runs, tmp_path / "report.html"))
    assert [run["name"] for run in page.curves["runs"]] == ["demo", "wide"]
    assert "What differs" in page.text and "seed" in page.text
    assert "wide: docnames pretrained: seed 0, 1, 2 not run yet" in page.text


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, metrics()) for name in ("a", "b")]
    names = [run["name"] for run in Page(write_report(runs, tmp_path / "report.html")).curves["runs"]]
    assert names == [f"demo ({tmp_path / 'a'})", f"demo ({tmp_path / 'b'})"]


@pytest.mark.parametrize(
    "lines", [[], metrics()[:1], metrics()[:2], metrics()[:-5], metrics(nsp=False), SEEDS, finetunings([0.5], []), measured()]
)
def test_a_run_in_any_state_has_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    assert "Incomplete" in page.text
    assert page.open == []


def test_names_and_messages_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script>'
    lines = [{**line, "phase": evil} if "phase" in line else line for line in metrics()]
    lines += [{**line, "name": evil} for line in SEEDS] + [{"kind": "event", "what": evil, "message": evil}]
    page = Page(write_report([write_run(tmp_path / "run", lines, settings(evil))], tmp_path / "report.html"))
    assert len(page.scripts) == 3
    assert page.curves["runs"][0]["name"] == evil


def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    lines = [{"kind": "train", "phase": "short", "step": i, "global_step": i, "seconds": i / 2, "loss": 1.0} for i in range(1, 7001)]
    page = Page(write_report([write_run(tmp_path / "run", lines)], tmp_path / "report.html"))
    assert len(page.curves["runs"][0]["train"]["step"]) <= 3000
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


def test_a_full_disk_leaves_the_older_page_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = write_run(tmp_path / "run", metrics()), tmp_path / "out" / "report.html"
    write_report([folder], out)
    before = out.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(UserError, match=r"report\.html could not be written: .*No space left"):
        write_report([folder], out)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]


def test_without_plotly_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", metrics())
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"pip install 'overnight\[report\]'"):
        write_report([folder], tmp_path / "report.html")
