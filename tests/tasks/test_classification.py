"""GLUE and SST from their original files: counts, labels, quoting, and bad rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight.config.schema import Columns
from overnight.errors import ConfigError, DataError
from overnight.tasks.classification import labeled_rows, load_task

# As counted in the data's own index.
COUNTS = {
    "cola": ("CoLA", 8551, 1043, 1063),
    "mrpc": ("MRPC", 3667, 408, 1725),
    "rte": ("RTE", 2490, 277, 3000),
    "stsb": ("STS-B", 5749, 1500, 1379),
    "sst2": ("SST-2", 67349, 872, 1821),
    "wnli": ("WNLI", 635, 71, 146),
}


@pytest.mark.parametrize("task", COUNTS)
def test_glue_tasks_have_the_published_number_of_rows(task: str, data: Path) -> None:
    folder, *counts = COUNTS[task]
    read = load_task(task, data / "glue" / folder)
    assert [len(read.train), len(read.dev), len(read.test)] == counts
    assert {r.label for r in read.train} == set(read.labels) or task == "stsb"
    assert all(r.label is None for r in read.test)
    assert not read.notes
    for rows in (read.train, read.dev, read.test):
        assert len({r.id for r in rows}) == len(rows)


def test_sst_has_the_published_number_of_rows_and_reads_quoted_sentences(data: Path) -> None:
    read = load_task("sst", data / "sst")
    assert (len(read.train), len(read.dev), len(read.test)) == (6920, 872, 1821)
    assert read.dev[1].text_a.startswith("If you've ever entertained the notion of doing what the title of this film implies, what Sex")
    assert read.test[0].label == "0"


def test_stsb_is_a_regression_whose_scores_are_0_to_5(data: Path) -> None:
    read = load_task("stsb", data / "glue" / "STS-B")
    assert read.kind == "regression" and read.labels == () and read.main_metric == "spearman"
    assert all(isinstance(r.label, float) and 0 <= r.label <= 5 for r in read.train + read.dev)


def test_mrpc_from_microsofts_files_is_the_glue_split_with_labeled_test_rows(data: Path, tmp_path: Path) -> None:
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv"):
        (tmp_path / name).symlink_to((data / "glue" / "MRPC" / name).resolve())
    original, glue = load_task("mrpc", tmp_path), load_task("mrpc", data / "glue" / "MRPC")
    assert (len(original.train), len(original.dev), len(original.test)) == (3668, 408, 1725)
    assert {(r.text_a, r.text_b, r.label) for r in original.dev} == {(r.text_a, r.text_b, r.label) for r in glue.dev}
    assert {(r.text_a, r.text_b) for r in glue.train} <= {(r.text_a, r.text_b) for r in original.train}
    assert {r.label for r in original.test} == {"0", "1"}


def test_mrpc_without_the_ids_of_its_dev_rows_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    (tmp_path / "msr_paraphrase_train.txt").symlink_to((data / "glue" / "MRPC" / "msr_paraphrase_train.txt").resolve())
    with pytest.raises(DataError, match=r"dev_ids\.tsv: is missing"):
        load_task("mrpc", tmp_path)
    (tmp_path / "dev_ids.tsv").write_text("1\t2\n")
    with pytest.raises(DataError, match=r"1 pairs are not in msr_paraphrase_train\.txt, such as 1 2"):
        load_task("mrpc", tmp_path)


def test_qnli_without_its_train_file_is_refused_by_name(data: Path) -> None:
    with pytest.raises(DataError, match=r"QNLI/train\.tsv: is missing; task 'qnli'"):
        load_task("qnli", data / "glue" / "QNLI")


def _write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8", newline="")
    return folder


def test_a_quotation_mark_in_a_tsv_is_a_character_and_only_newlines_end_a_row(tmp_path: Path) -> None:
    head = "sentence\tlabel\n"
    folder = _write(tmp_path, train=head + '" one\t1\n two"\t0\n', dev=head + "a\u2028b\u0085c\t1\r\n")
    read = load_task("sst2", folder)
    assert [r.text_a for r in read.train] == ['" one', 'two"']
    assert [(r.text_a, r.label) for r in read.dev] == [("a\u2028b\u0085c", "1")]
    assert read.test == []


def test_a_row_with_another_number_of_fields_is_named_by_file_and_line(tmp_path: Path) -> None:
    folder = _write(tmp_path, train="sentence\tlabel\ngood\t1\nno label\nalso\tnone\tgood\n", dev="sentence\tlabel\ngood\t1\n")
    with pytest.raises(DataError, match=r"train\.tsv:3: 1 tab-separated fields where 2 belong: sentence, label \(2 such lines"):
        load_task("sst2", folder)


def test_an_unknown_label_is_named_by_file_and_line(tmp_path: Path) -> None:
    folder = _write(tmp_path, train="sentence\tlabel\ngood\t2\n", dev="sentence\tlabel\ngood\t1\n")
    with pytest.raises(DataError, match=r"train\.tsv:2: label '2' is not one of 0, 1"):
        load_task("sst2", folder)


@pytest.mark.parametrize(("score", "why"), [("5.1", "between 0 and 5"), ("nan", "between 0 and 5"), ("high", "not a number")])
def test_a_score_out_of_range_is_named_by_file_and_line(score: str, why: str, tmp_path: Path) -> None:
    folder = _write(tmp_path, train=f"index\tsentence1\tsentence2\tscore\n0\ta\tb\t{score}\n", dev="index\tsentence1\tsentence2\tscore\n")
    with pytest.raises(DataError, match=rf"train\.tsv:2: score '{score}' is not .*{why}|train\.tsv:2: score '{score}' is {why}"):
        load_task("stsb", folder)


def test_a_file_in_another_layout_names_the_column_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tsv:1: has no column 'sentence' \(it has text, label\)"):
        load_task("sst2", _write(tmp_path, train="text\tlabel\ngood\t1\n"))


def test_a_file_without_rows_and_a_file_that_is_not_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tsv: holds no rows"):
        load_task("sst2", _write(tmp_path, train="sentence\tlabel\n"))
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\ncaf\xe9\t1\n")
    with pytest.raises(DataError, match=r"train\.tsv: byte 0xe9 at offset 18 is not UTF-8"):
        load_task("sst2", tmp_path)


def test_a_missing_folder_and_an_unknown_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: is not a folder"):
        load_task("rte", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"task 'sentiment': is not one of cola, sst2"):
        load_task("sentiment", tmp_path)


def test_mnli_reads_matched_and_mismatched_rows_with_headers_of_their_own(tmp_path: Path) -> None:
    columns = [
        "index",
        "promptID",
        "pairID",
        "genre",
        "sentence1_binary_parse",
        "sentence2_binary_parse",
        "sentence1_parse",
        "sentence2_parse",
        "sentence1",
        "sentence2",
    ]
    fields = ["0", "1", "1a", "fiction", "( a )", "( b )", "(A)", "(B)", "a man", "a person"]
    train = "\t".join([*columns, "label1", "gold_label"]) + "\n" + "\t".join([*fields, "neutral", "entailment"]) + "\n"
    labels = [f"label{i}" for i in range(1, 6)]
    dev = "\t".join([*columns, *labels, "gold_label"]) + "\n" + "\t".join([*fields, *labels, "contradiction"]) + "\n"
    test = "\t".join(columns) + "\n" + "\t".join(fields) + "\n"
    folder = _write(tmp_path, train=train, dev_matched=dev, dev_mismatched=dev, test_matched=test, test_mismatched=test)
    read = load_task("mnli", folder)
    assert read.labels == ("contradiction", "entailment", "neutral")
    assert (read.train[0].text_a, read.train[0].text_b, read.train[0].label) == ("a man", "a person", "entailment")
    assert read.dev[0].label == "contradiction" and read.test[0].label is None
    assert {name: len(rows) for name, rows in read.extra.items()} == {"dev_mismatched": 1, "test_mismatched": 1}


def test_the_broken_lines_of_qqp_are_left_out_and_told_up_to_a_limit(tmp_path: Path) -> None:
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    good = "7\t1\t2\tHow?\tWhy?\t0\n"
    broken = '"\tWas he a real figure?\t0\n'
    folder = _write(tmp_path, train=head + good + broken, dev=head + good)
    read = load_task("qqp", folder)
    assert [(r.id, r.text_a, r.text_b) for r in read.train] == [("7", "How?", "Why?")]
    assert len(read.notes) == 1 and "train.tsv:3: 3 tab-separated fields" in read.notes[0]
    _write(tmp_path, train=head + good + broken * 33)
    with pytest.raises(DataError, match=r"train\.tsv:3: .*33 such lines"):
        load_task("qqp", folder)


@pytest.mark.parametrize("name", ["train", "dev", "test"])
def test_an_id_that_repeats_in_a_file_of_glue_is_named(name: str, tmp_path: Path) -> None:
    head, rows = "index\tsentence1\tsentence2\tlabel\n", "0\ta\tb\tentailment\n1\tc\td\tentailment\n"
    folder = _write(tmp_path, train=head + rows, dev=head + rows, test=head + rows)
    _write(tmp_path, **{name: head + rows + rows})
    with pytest.raises(DataError, match=rf"{name}\.tsv:4: id '0' was used before"):
        load_task("rte", folder)


@pytest.mark.parametrize(
    ("task", "head", "target", "dev"),
    [("mnli", "index\tsentence1\tsentence2", "gold_label", "dev_matched"), ("cola", "index\tsentence", "label", "dev")],
)
def test_rows_to_score_without_labels_are_said_to_be_those_of_a_test_file(
    task: str, head: str, target: str, dev: str, tmp_path: Path
) -> None:
    columns = len(head.split("\t"))
    _write(tmp_path, test="\n".join([head, "\t".join("0a b"[:columns]), ""]))
    said = rf"test\.tsv: has no labels \(column '{target}'\), as the test files of GLUE; score {dev}\.tsv, or answer these with `overnight predict`"
    with pytest.raises(DataError, match=said):
        labeled_rows(task, tmp_path / "test.tsv", Columns(), "classification", ("0", "1"))


def test_sst_rows_with_another_label_or_a_broken_quote_are_named(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}_binary_sent.csv").write_text("label,sentence\n1,good\n")
    (tmp_path / "train_binary_sent.csv").write_text('label,sentence\n1,"a, b"\n3,bad\n')
    with pytest.raises(DataError, match=r"train_binary_sent\.csv:3: label '3' must be 0 or 1"):
        load_task("sst", tmp_path)
    (tmp_path / "train_binary_sent.csv").write_text('label,sentence\n1,"never closed\n')
    with pytest.raises(DataError, match=r"train_binary_sent\.csv:\d: unexpected end of data"):
        load_task("sst", tmp_path)


def test_a_label_of_glue_that_the_model_calls_otherwise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("gj04\t1\t\tA sentence.\n")
    assert labeled_rows("cola", tmp_path / "dev.tsv", Columns(), "classification", ("0", "1"))[0].label == "1"
    with pytest.raises(DataError, match=r"row 0 has label '1', which no training row has \(LABEL_0, LABEL_1\)"):
        labeled_rows("cola", tmp_path / "dev.tsv", Columns(), "classification", ("LABEL_0", "LABEL_1"))
