"""Plant near-duplicates in real text, and compare what is found with exact similarity, and with datasketch's MinHash in the same process.

    OVERNIGHT_DATA=... python -m benchmarks.near_duplicates             ten minutes on one core; `pip install 'overnight[peer,tasks]'`
    python -m benchmarks.near_duplicates --only memory                  peak memory of 200,000 to 1,600,000 generated documents

Copies of IMDB reviews and of pages of books with 1 to 20 % of their words replaced, left out or added at random are put among the originals; the Amazon reviews have
duplicates of their own. Truth is the exact Jaccard similarity of all pairs of documents. A document is to be dropped if it is connected, by pairs at or above the
threshold, with an earlier one. Speed is that of CPU time, one process. Into benchmarks/results/<date>-<machine>-near-duplicates/ goes result.json.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from overnight.corpus import dedup, external_sort, near_duplicates, shingles
from overnight.corpus.clean import clean
from overnight.corpus.near_duplicates import WORDS
from overnight.corpus.shards import seal_chunk, write_table
from overnight.run_dir.environment import environment

DATA = Path(os.environ.get("OVERNIGHT_DATA", ""))
EDITS = (0.01, 0.02, 0.03, 0.05, 0.10, 0.20)
_PAGE = 6000  # characters of a page of a book
_CHUNK = 500  # documents


def reviews(count: int) -> Iterator[str]:
    """Yield unlabeled IMDB reviews."""
    with tarfile.open(DATA / "aclImdb.tar.xz") as archive:
        members = (member for member in archive if member.isfile() and "/unsup/" in member.name)
        for member, _ in zip(members, range(count), strict=False):
            file = archive.extractfile(member)
            assert file is not None
            yield file.read().decode()


def pages(count: int) -> Iterator[str]:
    """Yield pages of books, 10 of each."""
    with tarfile.open(DATA / "books-classic.tar.xz") as archive:
        members = (member for member in archive if member.isfile() and member.name.endswith(".md"))
        for member, _ in zip(members, range(count // 10), strict=False):
            file = archive.extractfile(member)
            assert file is not None
            text = file.read().decode()
            yield from (text[first : first + _PAGE] for first in range(_PAGE, min(11 * _PAGE, len(text) - _PAGE), _PAGE))


def products() -> Iterator[str]:
    """Yield the reviews of All_Beauty, many of them more than once."""
    with gzip.open(DATA / "amazon/All_Beauty_5.json.gz", "rt", encoding="utf-8") as file:
        yield from (json.loads(line).get("reviewText", "") for line in file)


def edited(rng: random.Random, text: str, share: float, words: list[str]) -> str:
    """Return a text in which a share of the words is replaced, left out, or followed by another."""
    found = text.split(" ")
    for place in sorted(rng.sample(range(len(found)), round(share * len(found))), reverse=True):
        found[place : place + 1] = rng.choice(([rng.choice(words)], [], [found[place], rng.choice(words)]))
    return " ".join(found)


def planted(texts: list[str], seed: int = 0) -> tuple[list[str], list[tuple[int, int, float]]]:
    """Return texts and edited copies of them, shuffled, and where each pair is with its share of edits."""
    rng = random.Random(seed)
    words = " ".join(texts[:200]).split()
    everything: list[tuple[int, float, str]] = [(number, 0.0, text) for number, text in enumerate(texts)]
    for number in range(0, len(texts), 2):
        share = EDITS[number // 2 % len(EDITS)]
        everything.append((number, share, edited(rng, texts[number], share, words)))
    rng.shuffle(everything)
    first = {number: place for place, (number, share, _) in enumerate(everything) if not share}
    pairs = [(first[number], place, share) for place, (number, share, _) in enumerate(everything) if share]
    return [text for *_, text in everything], pairs


def words_of(text: str) -> list[str]:
    """Return the words that shingles are of, for text of European languages."""
    return re.findall(r"[^\W_]+", text.lower())


def exact_pairs(texts: list[str], least: float) -> dict[tuple[int, int], float]:
    """Return Jaccard's similarity of the shingles of all pairs of documents that have at least that much."""
    from scipy.sparse import csr_array, triu

    encoded = [text.encode() for text in texts]
    flat, offsets = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])
    hashes, ends = shingles.ngram_hashes(flat, offsets, WORDS, whole_short=True)
    _, columns = np.unique(hashes, return_inverse=True)
    counts = csr_array((np.ones(len(columns), np.float32), columns, np.append(0, ends)))
    counts.sum_duplicates()
    counts.data[:] = 1
    sizes = np.diff(counts.indptr)
    both = triu(counts @ counts.T, 1, "coo")
    values = both.data / (sizes[both.row] + sizes[both.col] - both.data)
    keep = values >= least
    return dict(zip(zip(both.row[keep].tolist(), both.col[keep].tolist(), strict=True), values[keep].tolist(), strict=True))


def chunks_of(folder: Path, texts: list[str]) -> list[Path]:
    """Write texts as clean chunks."""
    paths = []
    for first in range(0, len(texts), _CHUNK):
        paths.append(folder / f"clean-{first // _CHUNK:05d}.arrow")
        write_table(paths[-1], {"text": pa.array(texts[first : first + _CHUNK], pa.large_string())})
        seal_chunk(paths[-1])
    return paths


def ours(texts: list[str], take: np.ndarray, threshold: float) -> tuple[dict[int, int], np.ndarray, float, float]:
    """Return near-duplicates with what they are like, the pairs that were found, and CPU seconds: of the signatures, and of all."""
    with tempfile.TemporaryDirectory() as folder:
        paths = chunks_of(Path(folder), texts)
        parts = np.split(take, range(_CHUNK, len(texts), _CHUNK))
        began = time.process_time()
        for path, part, first in zip(paths, parts, np.cumsum([0, *(part.sum() for part in parts)])[:-1], strict=True):
            near_duplicates.sign_chunk(near_duplicates.SignTask(path, part, int(first), threshold))
        signed = time.process_time()
        found, of = near_duplicates.find_near_duplicates(paths, parts, threshold, 1, lambda line: None)
        ended = time.process_time()
        pairs = np.concatenate([np.fromfile(path, np.uint64) for path in sorted(Path(folder).glob("pairs-*.u64"))]).reshape(-1, 2)
    return dict(zip(found.tolist(), of.tolist(), strict=True)), np.flatnonzero(take)[pairs.astype(np.int64)], signed - began, ended - began


def peer(texts: list[str], take: np.ndarray, threshold: float) -> tuple[set[int], float]:
    """Return the documents that datasketch finds to be like an earlier one that it kept, checked by its estimate, and its CPU seconds."""
    from datasketch import MinHash, MinHashLSH

    began = time.process_time()
    index, kept, found = MinHashLSH(threshold=threshold, num_perm=shingles.BINS), {}, set()
    for number in np.flatnonzero(take).tolist():
        words = words_of(texts[number])
        sketch = MinHash(num_perm=shingles.BINS)
        sketch.update_batch({" ".join(words[i : i + WORDS]).encode() for i in range(max(len(words) - WORDS + 1, 1))})
        if any(kept[other].jaccard(sketch) >= threshold for other in index.query(sketch)):
            found.add(number)
        else:
            kept[number] = sketch
            index.insert(number, sketch)
    return found, time.process_time() - began


def compared(found: set[int], truth: set[int]) -> dict[str, float]:
    """Return precision and recall."""
    both = len(found & truth)
    return {"dropped": len(found), "precision": both / max(len(found), 1), "recall": both / max(len(truth), 1)}


def study(name: str, texts: list[str], pairs: list[tuple[int, int, float]], threshold: float) -> dict[str, Any]:
    """Measure one corpus."""
    texts = [clean(text) for text in texts]
    hashes = [dedup.document_hash([text]) for text in texts]
    take = np.zeros(len(texts), bool)
    take[np.unique(np.array(hashes, "V16"), return_index=True)[1]] = True
    take &= np.array([bool(words_of(text)) for text in texts])
    exact = exact_pairs([text if taken else "" for text, taken in zip(texts, take, strict=True)], 0.0)
    similar = np.array([pair for pair, value in exact.items() if value >= threshold], np.uint64).reshape(-1, 2)
    truth = set(near_duplicates.clusters(similar)[0].tolist())
    ours(texts[:_CHUNK], take[:_CHUNK], threshold)  # imports and compiles
    found, found_pairs, signing, everything = ours(texts, take, threshold)
    megabytes = sum(len(text.encode()) for text, taken in zip(texts, take, strict=True) if taken) / 1e6
    values = [exact.get((int(a), int(b)), 0.0) for a, b in np.unique(found_pairs, axis=0)]
    result: dict[str, Any] = {
        "documents": len(texts),
        "distinct": int(take.sum()),
        "MB": megabytes,
        "near-duplicates": len(truth),
        **compared(set(found), truth),
        "least similarity of a pair": min(values, default=1.0),
        "signatures MB/s": megabytes / signing,
        "everything MB/s": megabytes / everything,
        "edits": {},
    }
    for share in EDITS if pairs else ():
        here = [(min(a, b), max(a, b)) for a, b, edits in pairs if edits == share and take[a] and take[b]]
        result["edits"][f"{share:.0%}"] = {
            "pairs": len(here),
            "mean similarity": float(np.mean([exact.get(pair, 0.0) for pair in here])),
            "at or above the threshold": float(np.mean([exact.get(pair, 0.0) >= threshold for pair in here])),
            "dropped": float(np.mean([found.get(a, a) == found.get(b, b) for a, b in here])),
        }
    if importlib.util.find_spec("datasketch"):
        others, seconds = peer(texts, take, threshold)
        result["datasketch"] = {**compared(others, truth), "everything MB/s": megabytes / seconds}
    print(f"{name}: {json.dumps(result, indent=1)}", flush=True)
    return result


def generate(folder: Path, count: int) -> None:
    """Write documents of 60 words, a tenth of them one before with its first and last word changed."""
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"w{number:05x}" for number in range(1 << 16)])
    for chunk in range(count // 5000):
        words = rng.integers(0, 1 << 16, (5000, 60))
        words[1::10] = words[::10]
        words[1::10, [0, 59]] = 7
        texts = pa.array([" ".join(row) for row in vocabulary[words].tolist()], pa.large_string())
        write_table(folder / f"clean-{chunk:05d}.arrow", {"text": texts})
        seal_chunk(folder / f"clean-{chunk:05d}.arrow")


def peak(count: int, threshold: float) -> dict[str, float]:
    """Return the most memory that a process of its own has used to find the near-duplicates of so many documents, and before it began."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), count)
        command = [sys.executable, "-m", "benchmarks.near_duplicates", "--find-in", folder, "--threshold", str(threshold)]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{count:,} documents: {json.dumps(found)}", flush=True)
    return found


def most_memory() -> float:
    """Return the most memory that this process has used, MB; what getrusage() says includes the process that started it."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def find_in(folder: Path, threshold: float) -> dict[str, float]:
    """Find the near-duplicates of what :func:`generate` wrote; return MB of memory at most, and before."""
    shingles._library()
    before = most_memory()
    paths = sorted(folder.glob("clean-*.arrow"))
    began = time.process_time()
    found, _ = near_duplicates.find_near_duplicates(paths, [np.ones(5000, bool)] * len(paths), threshold, 1, lambda line: None)
    return {
        "documents": 5000 * len(paths),
        "near-duplicates": len(found),
        "peak MB": most_memory(),
        "before MB": before,
        "CPU s": time.process_time() - began,
        "MB on the disk": sum(path.stat().st_size for path in folder.iterdir() if not path.name.startswith("clean")) / 1e6,
        "runs": sum(external_sort.is_sealed(path) for path in folder.glob("bands*.run")),
    }


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=3000, help="of IMDB and of books, before copies are planted")
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--only", nargs="+", default=["imdb", "books", "amazon", "memory"])
    parser.add_argument("--find-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.find_in:
        print(json.dumps(find_in(options.find_in, options.threshold)))
        return
    needed = {"imdb": "aclImdb.tar.xz", "books": "books-classic.tar.xz", "amazon": "amazon/All_Beauty_5.json.gz"}
    if lacking := [file for name, file in needed.items() if name in options.only and not (DATA / file).is_file()]:
        parser.error(f"{', '.join(lacking)}: not in OVERNIGHT_DATA={DATA}; set it, or leave them out by --only")
    result: dict[str, Any] = {"threshold": options.threshold, "environment": environment()}
    for name, read in (("imdb", reviews), ("books", pages)):
        if name in options.only:
            result[name] = study(name, *planted(list(read(options.documents))), options.threshold)
    if "amazon" in options.only:
        result["amazon"] = study("amazon", list(products()), [], options.threshold)
    if "memory" in options.only:
        result["memory"] = [peak(count, options.threshold) for count in (200_000, 400_000, 800_000, 1_600_000)]
    out = options.out / f"{date.today()}-{options.machine}-near-duplicates"
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
