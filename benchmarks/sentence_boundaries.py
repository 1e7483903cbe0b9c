"""Compare the sentence splitter with pySBD on real text: speed, boundaries of each, and a random sample of those where they differ.

    pip install pysbd
    python -m benchmarks.sentence_boundaries PATH [PATH ...] [--field reviewText] [--chars 250000] [--samples 40] [--seed 0]

A path is what `data.paths` takes. pySBD (Sadvilkar and Neumann 2020, arXiv 2010.09657; English rules) keeps what is said between two quotation marks
in one piece, so most of the differences in novels are sentences within a quotation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence

from overnight.config import Data
from overnight.corpus.clean import clean
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.sentences import sentences


def ends(parts: Sequence[str]) -> set[int]:
    """Return where each sentence but the last ends: as a number of characters that are no space."""
    found, position = set(), 0
    for part in parts[:-1]:
        position += len("".join(part.split()))
        found.add(position)
    return found


def paragraphs(data: Data, chars: int, rng: random.Random) -> Iterator[str]:
    """Yield paragraphs of the documents in random order, at most a tenth of `chars` of each document."""
    texts = [document.text for document in documents(data, start_reading(data))]
    rng.shuffle(texts)
    left = chars
    for text in texts:
        start = rng.randrange(max(1, len(text) - chars // 10))
        for paragraph in clean(text[start : start + chars // 10]).split("\n\n"):
            left -= len(paragraph)
            yield paragraph
        if left <= 0:
            return


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--field", default="text")
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import pysbd

    rng, segmenter = random.Random(args.seed), pysbd.Segmenter(language="en", clean=False)
    seconds, size, agreed = [0.0, 0.0], 0, 0
    only: tuple[list[str], list[str]] = ([], [])
    for paragraph in paragraphs(Data(paths=args.paths, field=args.field), args.chars, rng):
        size += len(paragraph.encode())
        found = []
        for number, split in enumerate((sentences, segmenter.segment)):
            began = time.process_time()
            found.append(ends(split(paragraph)))
            seconds[number] += time.process_time() - began
        agreed += len(found[0] & found[1])
        places = [place for place, char in enumerate(paragraph) if not char.isspace()]
        for number in (0, 1):
            for end in sorted(found[number] - found[1 - number]):
                place = places[end]
                only[number].append(f"{paragraph[max(0, place - 50) : place].rstrip()} | {paragraph[place : place + 40]}")
    print(f"{size / 1e6:.2f} MB: ours {size / 1e6 / seconds[0]:.1f} MB/s, pySBD {size / 1e6 / seconds[1]:.3f} MB/s")
    print(f"boundaries: {agreed} of both, {len(only[0])} of ours alone, {len(only[1])} of pySBD alone")
    for name, lines in zip(("ours alone", "pySBD alone"), only, strict=True):
        print(f"\n{name}:", *rng.sample(lines, min(args.samples, len(lines))), sep="\n  ")


if __name__ == "__main__":
    main()
