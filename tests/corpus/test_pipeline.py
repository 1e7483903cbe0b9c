"""Preparation from end to end: same bytes, continued, refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overnight.config import Data
from overnight.corpus import dedup, pipeline, tasks, vocabulary
from overnight.corpus.clean import clean
from overnight.corpus.pipeline import prepare
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import Manifest, open_shards, save_manifest
from overnight.corpus.tasks import TokenTask, token_chunk
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import ConfigError, DataError
from overnight.state_files import SEAL
from tests.corpus.folders import contents, is_valid
from tests.processes import HANG, wait_until

ROOT = Path(pipeline.__file__).parents[2]


def silent(line: str) -> None:
    pass


def write_corpus(folder: Path, count: int = 60, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdeghilnorstu", k=rng.randint(2, 9))) for _ in range(400)]
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for i in range(count):
        lines = [" ".join(rng.choices(words, k=rng.randint(4, 14))).capitalize() + "." for _ in range(rng.randint(5, 60))]
        texts.append("\n\n".join(" ".join(lines[j : j + 4]) for j in range(0, len(lines), 4)))
        (folder / f"{i:03d}.txt").write_text(texts[-1])
    return texts


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    write_corpus(tmp_path / "text")
    return tmp_path / "text"


def settings(corpus: Path, **changes: Any) -> Data:
    return dataclasses.replace(Data(paths=[str(corpus)], vocab_size=300, valid_fraction=0.2, workers=1), **changes)


def test_every_document_arrives_in_order_on_its_side_token_by_token(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(corpus), tmp_path / "out", silent, shard_tokens=4000)
    tokenizer = load_tokenizer(tmp_path / "out")
    expected: dict[str, list[list[list[int]]]] = {"train": [], "valid": []}
    for path in sorted(corpus.iterdir()):
        found = sentences(clean(path.read_text()))
        split = "valid" if is_valid(found) else "train"
        expected[split].append([tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in found])
    for split, documents in expected.items():
        read = []
        for shard in open_shards(tmp_path / "out", split):
            for d in range(len(shard.document_sentences) - 1):
                spans = range(shard.document_sentences[d], shard.document_sentences[d + 1])
                read.append([shard.tokens[shard.sentence_starts[s] : shard.sentence_starts[s + 1]].tolist() for s in spans])
        assert read == documents
        assert manifest.count(split, "documents") == len(documents) > 3
        assert manifest.count(split, "sentences") == sum(map(len, documents))
    sizes = [shard.tokens for shard in manifest.shards if shard.split == "train"]
    assert len(sizes) >= 3 and max(sizes) < 2 * min(sizes)
    assert not (tmp_path / "out" / "work").exists()


def test_the_bytes_do_not_depend_on_the_workers(corpus: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        prepare(settings(corpus, workers=workers), tmp_path / str(workers), silent, shard_tokens=4000)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "1")) > 6


def test_words_are_remembered_from_chunk_to_chunk_and_no_longer(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoders = []

    def counted(task: TokenTask) -> int:
        done = token_chunk(task)
        encoders.append(tasks._encoder.cache_info())
        return done

    monkeypatch.setattr(pipeline, "token_chunk", counted)
    prepare(settings(corpus), tmp_path / "out", silent)
    assert len(encoders) > 3 and encoders[-1].hits - encoders[0].hits == len(encoders) - 1 and encoders[-1].currsize == 1
    assert tasks._encoder.cache_info().currsize == 0


def test_documents_stay_on_their_side_when_others_are_added(corpus: Path, tmp_path: Path) -> None:
    def validation() -> set[bytes]:
        documents = [sentences(clean(path.read_text())) for path in corpus.iterdir()]
        return {dedup.document_hash(found) for found in documents if is_valid(found)}

    before = validation()
    assert prepare(settings(corpus), tmp_path / "a", silent).count("valid", "documents") == len(before)
    write_corpus(tmp_path / "more", 40, seed=1)
    for path in (tmp_path / "more").iterdir():
        shutil.copy(path, corpus / f"new-{path.name}")
    assert before < validation()
    assert prepare(settings(corpus), tmp_path / "b", silent).count("valid", "documents") == len(validation())


def test_duplicates_and_short_documents_are_dropped_and_counted(corpus: Path, tmp_path: Path) -> None:
    shutil.copy(corpus / "003.txt", corpus / "900.txt")
    (corpus / "901.txt").write_text((corpus / "004.txt").read_text().replace("\n\n", "\r\n\r\n "))
    (corpus / "902.txt").write_text("Too short.")
    manifest = prepare(settings(corpus), tmp_path / "out", silent)
    assert (manifest.duplicates, manifest.short, manifest.sources[0].documents) == (2, 1, 63)
    assert manifest.count("train", "documents") + manifest.count("valid", "documents") == 60


def test_a_given_vocabulary_is_taken_as_it_is(corpus: Path, tmp_path: Path) -> None:
    tokens = ["zz", "[SEP]", "[CLS]", "[MASK]", "[UNK]", "[PAD]", *"abcdeghilnorstu.", *(f"##{c}" for c in "abcdeghilnorstu")]
    (tmp_path / "v.txt").write_text("\n".join(tokens))
    given = settings(corpus, vocab_file=str(tmp_path / "v.txt"), vocab_size=len(tokens))
    prepare(given, tmp_path / "out", silent)
    assert (tmp_path / "out/vocab.txt").read_text().split() == tokens
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 99: .* has 37 tokens"):
        prepare(settings(corpus, vocab_file=str(tmp_path / "v.txt"), vocab_size=99), tmp_path / "other", silent)


def test_a_prepared_folder_returns_at_once_and_refuses_other_settings(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(corpus), tmp_path / "out", silent)
    shutil.rmtree(corpus)  # it needs no source any more
    lines: list[str] = []
    assert prepare(settings(corpus, workers=2, max_invalid_lines=5), tmp_path / "out", lines.append) == manifest
    assert lines == []
    with pytest.raises(
        ConfigError, match=r"data\.min_chars: prepared with 100, now asked for 7; data\.lowercase: prepared with True, now asked for False"
    ):
        prepare(settings(corpus, min_chars=7, lowercase=False), tmp_path / "out", silent)


def test_a_deleted_shard_is_made_anew(corpus: Path, tmp_path: Path) -> None:
    prepare(settings(corpus), tmp_path / "out", silent, shard_tokens=4000)
    before = contents(tmp_path / "out")
    path = tmp_path / "out/train-00001.arrow"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="delete it and prepare again"):
        open_shards(tmp_path / "out", "train")
    path.unlink()
    prepare(settings(corpus), tmp_path / "out", silent, shard_tokens=4000)
    assert contents(tmp_path / "out") == before


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stage", ["clean_chunk", "count_chunk", "token_chunk", "make_shard", "save_manifest"])
def test_it_continues_where_it_stopped_and_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    prepare(settings(corpus), tmp_path / "whole", silent, shard_tokens=4000)
    calls = []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > (0 if stage == "save_manifest" else 2):
            raise _StopError
        return original(*arguments)

    module = vocabulary if stage == "count_chunk" else pipeline
    original = getattr(module, stage)
    with monkeypatch.context() as patch:
        patch.setattr(module, stage, stopping)
        with pytest.raises(_StopError):
            prepare(settings(corpus), tmp_path / "out", silent, shard_tokens=4000)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/work").glob("*.arrow")}
    seen: dict[str, int] = {}

    def looking(folder: Path, manifest: Manifest) -> None:
        seen.update({path.name: path.stat().st_mtime_ns for path in (folder / "work").glob("*.arrow")})
        save_manifest(folder, manifest)

    monkeypatch.setattr(pipeline, "save_manifest", looking)
    lines: list[str] = []
    prepare(settings(corpus), tmp_path / "out", lines.append, shard_tokens=4000)
    assert lines[0].startswith("prepare: continuing")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert "clean-00000.arrow" in done
    assert done == {name: seen[name] for name in done}  # what was done was not done again


@pytest.mark.parametrize(
    ("until", "name"),
    [
        ("_tokenize", "vocab.txt"),
        ("_tokenize", "tokenizer.json"),
        ("_tokenize", "work/clean-00000.arrow"),
        ("_shard", "work/train-00000.arrow"),
        ("_shard", "work/valid-00000.arrow"),
        ("_shard", "work/train-00000.arrow.json"),
        ("_shard", "work/read.json"),
        ("save_manifest", "work/train-00000.json"),
        ("save_manifest", "train-00000.arrow"),
    ],
)
def test_a_changed_bit_in_what_an_interrupted_preparation_left_is_told(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str, name: str
) -> None:
    def stop(*arguments: Any) -> None:
        raise _StopError

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, until, stop)
        with pytest.raises(_StopError):
            prepare(settings(corpus), tmp_path / "out", silent)
    path = tmp_path / "out" / name
    content = path.read_bytes()
    # A letter or a digit, so that a JSON file stays one.
    at = next(i for i in range(len(content) // 2, len(content)) if content[i : i + 1].isdigit() or content[i : i + 1] in b"abcdefgh")
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(
        DataError,
        match=r"(?s)"
        + re.escape(path.name.removesuffix(".json"))
        + r".*(checksum differs|was changed|does not belong|is not JSON|unexpected)",
    ):
        prepare(settings(corpus), tmp_path / "out", silent)


def test_the_beginning_of_another_preparation_is_cleared_away(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(settings(corpus), tmp_path / "whole", silent)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "save_manifest", lambda *_: (_ for _ in ()).throw(_StopError))
        with pytest.raises(_StopError):
            prepare(settings(corpus, vocab_size=200), tmp_path / "out", silent, shard_tokens=2000)
    lines: list[str] = []
    prepare(settings(corpus), tmp_path / "out", lines.append)
    assert "other settings or sources; starting anew" in lines[0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_nothing_left_to_train_on_or_to_hold_out_is_refused_with_a_way_out(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"selects none of 60 documents for validation; use at least 0\.\d+ \(0 turns validation off\)"
    ) as error:
        prepare(settings(corpus, valid_fraction=1e-6), tmp_path / "out", silent)
    enough = float(str(error.value).split("at least ")[1].split()[0])
    assert prepare(settings(corpus, valid_fraction=enough), tmp_path / "out", silent).count("valid", "documents") >= 1
    assert prepare(settings(corpus, valid_fraction=0.0), tmp_path / "none", silent).count("valid", "documents") == 0
    with pytest.raises(DataError, match=r"60 documents found, and none of data\.min_chars = \d+ characters"):
        prepare(settings(corpus, min_chars=10**9), tmp_path / "long", silent)


def test_a_missing_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(settings(tmp_path / "absent"), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_before_there_was_a_setting_is_taken_where_it_has_its_default(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(corpus), tmp_path / "out", silent)
    old = {key: value for key, value in manifest.settings.items() if key not in ("tokenizer", "test_fraction", "label")}
    save_manifest(tmp_path / "out", dataclasses.replace(manifest, settings=old))
    assert prepare(settings(corpus), tmp_path / "out", silent).shards == manifest.shards
    with pytest.raises(ConfigError, match=r"data\.tokenizer: prepared with 'wordpiece', now asked for 'bytes'"):
        prepare(settings(corpus, tokenizer="bytes"), tmp_path / "out", silent)


RUNNER = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from overnight.config import Data
from overnight.corpus import pipeline
from overnight.errors import UserError
if __name__ == "__main__":
    pipeline.CHUNK_BYTES = 10_000
    limit = int(sys.argv[5])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    data = Data(paths=[sys.argv[2]], vocab_size=300, valid_fraction=0.2, workers=int(sys.argv[4]))
    try:
        pipeline.prepare(data, Path(sys.argv[3]), lambda line: print(line, flush=True), shard_tokens=4000)
    except UserError as error:
        print("refused:", error)
"""


def test_a_folder_cleaned_by_older_rules_is_used_as_it_is_and_told_apart(corpus: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(corpus), tmp_path / "out", silent)
    assert manifest.cleaning == pipeline.CLEANING > 1
    tree = json.loads((tmp_path / "out/manifest.json").read_text())
    del tree["cleaning"], tree[SEAL]
    (tmp_path / "out/manifest.json").write_text(json.dumps(tree))
    lines: list[str] = []
    old = prepare(settings(corpus), tmp_path / "out", lines.append)
    assert old.fingerprint() == manifest.fingerprint() and old.cleaning == 1
    assert f"was cleaned by version 1 of the rules, which now are version {pipeline.CLEANING}; it is used as it is" in "".join(lines)


def start(tmp_path: Path, corpus: Path, out: Path, workers: int, limit: int = 0) -> subprocess.Popen[str]:
    script = tmp_path / "runner.py"
    script.write_text(RUNNER)
    command = [sys.executable, str(script), str(ROOT), str(corpus), str(out), str(workers), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def group_is_empty(group: int) -> bool:
    """Whether no process of a group is alive (those that have ended but were not yet waited for do not count)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return False
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)])
def test_killed_or_interrupted_it_leaves_no_process_and_continues(corpus: Path, tmp_path: Path, how: signal.Signals) -> None:
    write_corpus(corpus, 150)
    prepare(settings(corpus), tmp_path / "whole", silent, shard_tokens=4000)
    process = start(tmp_path, corpus, tmp_path / "out", workers=2)
    wait_until(lambda: list((tmp_path / "out/work").glob("clean-00003*.arrow")), process)
    if how == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, how)  # as a terminal does
    process.communicate(timeout=HANG)
    assert process.returncode != 0
    assert not (tmp_path / "out/manifest.json").exists()
    deadline = time.monotonic() + HANG
    while not group_is_empty(process.pid):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    lines: list[str] = []
    prepare(settings(corpus), tmp_path / "out", lines.append, shard_tokens=4000)
    assert lines[0].startswith("prepare: continuing")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_with_what_is_needed_and_it_continues(corpus: Path, tmp_path: Path, workers: int) -> None:
    prepare(settings(corpus), tmp_path / "whole", silent, shard_tokens=4000)
    process = start(tmp_path, corpus, tmp_path / "out", workers, limit=9_000)
    output, _ = process.communicate(timeout=HANG)
    assert "refused:" in output and "need about" in output and "MB are free" in output and "continues" in output, output
    assert "ulimit -f" in output and "make room" not in output, "free room is not what is missing"
    assert not list((tmp_path / "out").rglob("*.tmp"))
    prepare(settings(corpus), tmp_path / "out", silent, shard_tokens=4000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small file system needs root")
def test_a_file_system_that_is_really_full_is_told(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "small")], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(DataError, match=r"cannot write \(No space left on device\).*MB are free"):
            prepare(settings(corpus), tmp_path / "small/out", silent)
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)
