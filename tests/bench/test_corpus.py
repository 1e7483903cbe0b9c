"""`overnight bench corpus`, its peer, and the text that it makes."""

from __future__ import annotations

import random
import signal
import string
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.bench import corpus, corpus_peer, processes
from overnight.bench.corpus_text import pack, recombined, texts
from overnight.cli.main import main
from overnight.config import Data
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.shingles import ngram_hashes, similarity, sketches
from overnight.corpus.tokenizer import SPECIALS, build_tokenizer
from tests.bench.test_benchmarks import assert_result

TOKENS = [*SPECIALS, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase), "the", "##ing", ".", ",", "-", "中", "é", "!"]


def books(folder: Path, count: int = 30) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeghilnorstu", k=rng.randint(2, 9))) for _ in range(600)]
    folder.mkdir()
    for number in range(count):
        lines = (" ".join(rng.choices(words, k=rng.randint(4, 14))).capitalize() + "." for _ in range(300))
        (folder / f"{number:02d}.txt").write_text("\n".join(lines))
    return folder


@settings(max_examples=200)
@given(
    text=st.lists(st.sampled_from([*"abTz .,-!\t\n\u00a0", "the", "ing", "é", "É", "中", "İ", "\u200b", "—", "\0", "x" * 60])).map("".join)
)
def test_the_pure_python_peer_tokenizes_as_the_library_does(text: str) -> None:
    expected = build_tokenizer(TOKENS, lowercase=True).encode(text, add_special_tokens=False).tokens
    assert corpus_peer.PurePythonTokenizer(TOKENS).tokenize(text) == expected


def test_the_peer_writes_pairs_with_masks_of_known_size(tmp_path: Path) -> None:
    rng = random.Random(1)
    split = [[" ".join(rng.choices(["the", "abc", "doing"], k=rng.randint(3, 12))) + "." for _ in range(60)] for _ in range(8)]
    count = corpus_peer.write_examples(split, TOKENS, tmp_path / "records")
    content, records = (tmp_path / "records").read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        records.append(array("q", content[8 : 8 + size]).tolist())
        content = content[8 + size :]
    length, most = corpus_peer.LENGTH, corpus_peer.PREDICTIONS
    assert count == len(records) > 50
    drawn, random_next, masked = 0, 0, 0
    for record in records:
        assert len(record) == 3 * length + 3 * most + 1
        ids, real, segments = (record[i * length : (i + 1) * length] for i in range(3))
        positions, labels, weights = (record[3 * length + i * most : 3 * length + (i + 1) * most] for i in range(3))
        used = sum(real)
        assert ids[0] == TOKENS.index("[CLS]") and ids[used - 1] == TOKENS.index("[SEP]") and set(ids[used:]) <= {0}
        assert segments[:used] == sorted(segments[:used]) and set(segments[:used]) == {0, 1}
        predicted = sum(weights)
        assert predicted == min(most, max(1, round(used * corpus_peer.MASKED)))
        assert all(0 < place < used for place in positions[:predicted]) and all(labels[:predicted])
        masked += sum(ids[place] == TOKENS.index("[MASK]") for place in positions[:predicted])
        drawn, random_next = drawn + predicted, random_next + record[-1]
    assert 0.7 < masked / drawn < 0.9 and 0.35 < random_next / count < 0.75


def test_recombined_text_is_as_long_as_asked_and_no_near_duplicate(tmp_path: Path) -> None:
    source = str(books(tmp_path / "books", 12))
    found = list(recombined(source, 200_000))
    assert found == list(recombined(source, 200_000))
    assert 0.9 < sum(map(len, found)) / 200_000 < 1.3
    content = [text.encode() for text in found]
    hashes = ngram_hashes(np.frombuffer(b"".join(content), np.uint8), np.cumsum([0, *map(len, content)]), 5)
    sketch, _ = sketches(*hashes, 20, 5)
    pairs = np.triu_indices(len(found), 1)
    assert len(found) > 5 and similarity(sketch[pairs[0]], sketch[pairs[1]]).max() < 0.5
    old, new = ({word for text in several for word in text.split()} for several in (texts(source, 0), found))
    assert len(new - old) > 20


def test_the_first_megabytes_of_a_source_are_packed_and_read_again(tmp_path: Path) -> None:
    source = str(books(tmp_path / "books", 5))
    everything = list(texts(source, 0))
    size = sum(map(len, everything))
    cut = list(texts(source, size * 0.5))
    assert sum(map(len, cut)) == int(size * 0.5) and everything[: len(cut) - 1] == cut[:-1] and everything[len(cut) - 1].startswith(cut[-1])
    assert pack(iter(cut), tmp_path / "packed.tar.xz") == int(size * 0.5)
    data = Data(paths=[str(tmp_path / "packed.tar.xz")])
    assert [document.text for document in documents(data, start_reading(data))] == cut


def test_memory_and_processor_time_of_processes_below_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_EVERY", 0.02)
    child = "x = bytearray(b'1') * 60_000_000; sum(range(3_000_000)); print('held', flush=True); input()"
    code = f"""
import subprocess, sys, time
open({str(tmp_path / "f")!r}, "wb").write(b"0" * 1000)
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.stdout.readline().decode().strip(), flush=True)
time.sleep(0.5)
child.communicate(b"\\n")
"""
    lines: list[str] = []
    cost = processes.measured([sys.executable, "-c", code], tmp_path, lines.append)
    assert lines == ["held"] and cost.peak_disk == 1000
    assert 60e6 < cost.peak_memory < 150e6 and cost.cpu_seconds > 0.02
    with pytest.raises(SystemExit) as ended:
        processes.measured([sys.executable, "-c", "raise SystemExit(7)"], tmp_path, lines.append)
    assert ended.value.code == 7


def test_a_command_ends_with_the_measurement_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *args, **kwargs: (started.append(real(*args, **kwargs)), started[0])[1])

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.measured(["sh", "-c", "echo begun; exec sleep 60"], tmp_path, interrupted)
    assert started[0].poll() == -signal.SIGTERM


def test_text_that_is_not_ascii_is_measured_in_bytes(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = (" ".join(rng.choices(["мама", "мыла", "раму", "долго"], k=9)).capitalize() + "." for _ in range(300))
    (tmp_path / "book.txt").write_text("\n".join(lines), encoding="utf-8")
    source = str(tmp_path / "book.txt")
    for size in (1000, 1001, 1002):
        (text,) = texts(source, size)
        assert len(text.encode()) in (size - 1, size)  # a letter of two bytes is not cut
    assert sum(len(text.encode()) for text in recombined(source, 60_000)) == pytest.approx(60_000, rel=0.1)


def test_a_glob_of_archives_is_packed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(iter(["One text. Another one."]), tmp_path / "one.tar.xz")
    sources: list[str] = []

    def prepared(source: str, *rest: Any) -> Any:
        sources.append(source)
        raise RuntimeError("the rest is of no concern")

    monkeypatch.setattr(corpus, "prepared", prepared)
    for name in ("*.tar.xz", "one.tar.xz"):
        with pytest.raises(RuntimeError, match="no concern"):
            corpus.run(text=str(tmp_path / name))
    assert Path(sources[0]).name == "text.tar.xz" and sources[1] == str(tmp_path / "one.tar.xz")


@pytest.mark.heavy
def test_preparation_is_measured_beside_its_peer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "corpus", "--tiny", "--text", str(books(tmp_path / "books")), "--workers", "1"]
    assert main([*arguments, "--size", "0.4", "--times", "2"]) == 0
    rows = {row["name"]: row for row in assert_result(capfd.readouterr().out, "corpus")}
    assert list(rows)[1:5] == ["prepare, one core", "memory of all processes", "disk while preparing", "disk that training reads, a token"]
    assert 1.0 < rows["disk that training reads, a token"]["value"] < 3.0
    assert rows["raw text to masked examples, one core"]["peer"] == "pure Python, by hand"
    assert rows["memory, 2 times the text"]["peer_value"] == rows["memory of all processes"]["value"]
    assert {"unpack", "clean", "tokenize, all words new", "tokenize, all words known", "masked batches, one core"} <= set(rows)


@pytest.mark.parametrize(
    ("option", "value"), [("size", "-1"), ("size", "nan"), ("size", "0.01"), ("times", "0"), ("times", "-2"), ("workers", "-3")]
)
def test_no_text_is_prepared_for_a_size_that_is_none(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "corpus", f"--{option}={value}"]) == 2
    assert f"--{option} = {value}: must be" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["/absent", "$ABSENT/x"])
def test_a_text_that_is_not_there_is_said_by_its_option(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "corpus", "--tiny", f"--text={text}"]) != 0
    said = capsys.readouterr().err
    assert "--text" in said and "data.paths" not in said


def test_options_of_the_corpus_belong_to_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--size", "3"]) == 2
    assert "--size: belongs to `overnight bench corpus` alone" in capsys.readouterr().err
