"""Wikitext to plain text: speed, words kept and markup left, beside mwparserfromhell.

    python -m benchmarks.wikitext_peer $OVERNIGHT_DATA/wiki/*.bz2             # prints the result; needs the extra `peer`
    python -m benchmarks.wikitext_peer DUMP.xml.bz2 --pages 500 --lost 40     # the words that are lost most often, and in which pages

The peer's text is that of its `strip_code`, after what no reader of a sentence sees was removed from its tree: tables, references, formulas, programs,
galleries, and links to files, categories and other languages. Its templates all go. Words are runs of letters and digits, counted page by page.
Ours may have more: words of templates (`{{convert|5|km}}`). Ours may have fewer: headings of sections without text. Both read the same wikitext, the
peer once, behind ours; the time is that of the processor, which other programs on it do not count against.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mwparserfromhell
from mwparserfromhell.nodes import Tag, Wikilink
from mwparserfromhell.wikicode import Wikicode

from overnight.bench.measure import Row, Timing, print_result, rate_row
from overnight.config import Data
from overnight.corpus import wikipedia_dump, wikitext
from overnight.corpus.clean import clean
from overnight.corpus.readers import documents_and_parts, start_reading
from overnight.corpus.sentences import sentences
from overnight.corpus.wikipedia_dump import DumpPart

WORD = re.compile(r"\w+")
MARKS = ("[[", "{{", "|", "<ref", "''", "==")
SENTENCES = 1000
_STAGES = {"packed dump unpacked": False, "packed dump to sentences": True}
_HIDDEN_TAGS = wikitext.DROPPED | {"table"}
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}|simple)(?:-[a-z]+)*")


def wikitexts(paths: Sequence[str], limit: int) -> Iterator[tuple[str, str, int]]:
    """Yield the title, wikitext and bytes of XML of the articles of dumps, redirects left out."""
    data = Data(paths=list(paths), on_truncated_file="keep")
    for part in documents_and_parts(data, start_reading(data)):
        assert isinstance(part, DumpPart)
        for title, text, size in wikipedia_dump.articles(part):
            if (limit := limit - 1) < 0:
                return
            yield title, text, size


def peer(text: str) -> str:
    """Return what the peer keeps of a page."""
    code = mwparserfromhell.parse(text)
    _remove(code)
    return str(code.strip_code())


def _remove(code: Wikicode) -> None:
    for node in code.filter(recursive=True, matches=_unseen):
        try:
            code.remove(node)
        except ValueError:
            continue  # it was within another that is gone


def _unseen(node: object) -> bool:
    if isinstance(node, Tag):
        return str(node.tag).strip().lower() in _HIDDEN_TAGS
    if isinstance(node, Wikilink):
        prefix, colon, _ = str(node.title).partition(":")
        return bool(colon) and (prefix.strip().lower() in wikitext.HIDDEN_NAMESPACES or _LANGUAGE.fullmatch(prefix) is not None)
    return False


def words(text: str) -> Counter[str]:
    """Return the words of a text, in lower case, with their number."""
    return Counter(WORD.findall(text.lower()))


def timed(function: Callable[[str], str], texts: Sequence[str]) -> tuple[float, list[str]]:
    """Return the seconds of the processor that a function takes for texts, and what it gives."""
    start = time.process_time()
    results = [function(text) for text in texts]
    return time.process_time() - start, results


def prepared(paths: Sequence[str], clean_too: bool) -> float:
    """Return the seconds of the processor from packed dumps to their XML, or to sentences."""
    data = Data(paths=list(paths), on_truncated_file="keep")
    start = time.process_time()
    for part in documents_and_parts(data, start_reading(data)):
        if clean_too:
            assert isinstance(part, DumpPart)
            for text in wikipedia_dump.read_part(part)[0]:
                sentences(clean(text))
    return time.process_time() - start


def marked(texts: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Return sentences drawn from prepared texts, and those of them that have markup left."""
    found = [sentence for text in texts for sentence in sentences(clean(text))]
    drawn = random.Random(seed).sample(found, min(SENTENCES, len(found)))
    return drawn, [sentence for sentence in drawn if any(mark in sentence for mark in MARKS)]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", nargs="+", help="dumps in XML, packed or not")
    parser.add_argument("--pages", type=int, default=1 << 40, help="articles at most")
    parser.add_argument("--repeats", type=int, default=5, help="passes of ours; the peer takes one")
    parser.add_argument("--lost", type=int, default=0, help="print so many of the words that only the peer has")
    parser.add_argument("--read", type=int, default=0, help="print so many of the drawn sentences, to be read")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn sentences")
    options = parser.parse_args()
    for dump in options.dumps:
        assert Path(dump).is_file(), f"{dump}: there is no such file"

    pages = list(wikitexts(options.dumps, options.pages))
    texts = [text for _, text, _ in pages]
    megabytes = sum(size for *_, size in pages) / 1e6
    passes = [timed(wikitext.plain, texts) for _ in range(options.repeats)]
    ours = passes[0][1]
    their_seconds, theirs = timed(peer, texts)

    wanted = kept = added = 0
    lost: Counter[str] = Counter()
    for (title, _, _), mine, other in zip(pages, ours, theirs, strict=True):
        here, there = words(mine), words(other)
        both = here & there
        wanted, kept, added = wanted + there.total(), kept + both.total(), added + (here - there).total()
        lost.update({f"{title}: {word}": count for word, count in (there - here).items()})
    for word, count in lost.most_common(options.lost):
        print(f"{count:6} {word}")
    drawn, left = marked(ours, options.seed)
    for sentence in [*left, *drawn[: options.read]]:
        print(f"- {sentence}")
    speed = rate_row(
        "wikitext to text, of XML",
        "MB/s",
        megabytes,
        Timing(tuple(seconds for seconds, _ in passes)),
        "mwparserfromhell",
        Timing((their_seconds,)),
    )
    stages = {
        what: Timing(tuple(prepared(options.dumps, wanted_sentences) for _ in range(options.repeats)))
        for what, wanted_sentences in _STAGES.items()
    }
    rows = [
        speed,
        *(rate_row(f"{what}, of XML", "MB/s", megabytes, timing) for what, timing in stages.items()),
        Row("words of the peer that are kept", 100 * kept / wanted, "%"),
        Row("words that the peer has not", 100 * added / wanted, "%"),
        Row(f"of {len(drawn)} sentences, those with markup left", 100 * len(left) / len(drawn), "%"),
    ]
    print_result("wikitext", rows)


if __name__ == "__main__":
    main()
