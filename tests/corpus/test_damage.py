"""Whatever happens to the bytes of a source, reading it ends in documents or in an error that names the file."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.errors import DataError
from tests.corpus.test_rows import write
from tests.corpus.test_web import page, record, response
from tests.corpus.test_zips import zip_of
from tests.reading import read

TEXT = b"Some words of a text, and more of them.\n" * 30


def samples(folder: Path) -> dict[str, bytes]:
    """A small file of each kind that has a structure to damage."""
    book = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": b'<container><rootfile full-path="p.opf"/></container>',
        "p.opf": b'<package><manifest><item id="a" href="a.html" media-type="text/html"/></manifest><spine><itemref idref="a"/></spine></package>',
        "a.html": page(),
    }
    found = {
        "zip": zip_of({"a.txt": TEXT, "b.md": TEXT, "c.csv": b"text\n" + TEXT}),
        "streamed.zip": zip_of({"a.txt": TEXT, "b.md": TEXT}, streamed=True),
        "wet": record("conversion", TEXT) + record("conversion", TEXT),
        "wet.gz": gzip.compress(record("conversion", TEXT)) * 2,
        **{
            kind: write(folder, kind, [{"text": "one, two", "n": 1}, {"text": "three", "n": 2}]).read_bytes()
            for kind in ("csv", "tsv", "parquet")
        },
    }
    if importlib.util.find_spec("resiliparse"):
        found |= {
            "epub": zip_of(book),
            "html": page(),
            "warc": response(page()) + response(page(), "Content-Type: text/html\r\nTransfer-Encoding: chunked"),
        }
    return found


@pytest.mark.parametrize("kind", ["zip", "streamed.zip", "wet", "wet.gz", "csv", "tsv", "parquet", "epub", "html", "warc"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    found = samples(tmp_path)
    if kind not in found:
        pytest.skip("the extra `web` is not installed")
    content = bytearray(found[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(content) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "remove"])):
            case "flip" if content:
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=9))
            case _:
                del content[place : place + data.draw(st.integers(1, 9))]
    path = tmp_path / "damaged" / f"x.{kind}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    (path.parent / "y.txt").write_text("more")
    for choice in ("error", "keep"):
        try:
            documents, _ = read(path.parent, on_truncated_file=choice, encoding_errors="replace", max_invalid_lines=9)
            assert documents[-1].text == "more"
        except DataError as error:
            assert str(path.with_suffix("" if kind.endswith("gz") else path.suffix)) in str(error)
