"""When a prepared folder, or a run folder, is that of other settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from overnight import config
from overnight.config import Data, TextSource
from overnight.corpus.pipeline import prepare
from overnight.corpus.settings import different_settings, settings_of
from overnight.errors import ConfigError
from tests.corpus.folders import texts


def silent(line: str) -> None:
    """Say nothing."""


def test_a_path_and_its_variable_are_the_same_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_TEST", "/there")
    a, b, other = ({"paths": [path, "/x"]} for path in ("$OVERNIGHT_TEST/text", "/there/text", "$OVERNIGHT_TEST/other"))
    assert list(config.differences(a, b)) == []
    assert list(config.differences(a, other)) == ["paths: ['$OVERNIGHT_TEST/text', '/x'] there, ['$OVERNIGHT_TEST/other', '/x'] here"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("/txt", "/txt/", True),
        ("/txt", "//txt", True),
        ("txt/*.txt", "./txt//*.txt", True),
        ("a.tar::*/train/*", "./a.tar::*/train/*", True),
        ("$OVERNIGHT_TEST/text", "/there/text/", True),
        ("link/../txt", "txt", False),  # which may lie elsewhere
        ("a.tar::*/train/*", "a.tar::*/train//*", False),
        ("s3://bucket/txt", "s3:/bucket/txt", False),
    ],
)
def test_slashes_that_say_nothing_make_no_other_path(one: str, other: str, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_TEST", "/there")
    for of in (
        lambda path: Data(paths=[path]),
        lambda path: Data(decontaminate=[path]),
        lambda path: Data(sources={"mine": TextSource(paths=[path])}),
    ):
        a, b = of(one), of(other)
        assert (different_settings(settings_of(a), settings_of(b)) == []) is same
        assert (list(config.differences({"data": dataclasses.asdict(a)}, {"data": dataclasses.asdict(b)})) == []) is same
    assert not config.load.same_setting("text/", "text", "field")


def test_a_folder_prepared_with_a_variable_in_a_path_is_that_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_TEST", str(tmp_path))
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts(40)):
        (tmp_path / f"text/{number}.txt").write_text(text)
    with_variable, with_path, another = (
        Data(paths=[path], vocab_size=300, valid_fraction=0.2, min_chars=10, workers=1)
        for path in ("$OVERNIGHT_TEST/text", f"{tmp_path}/text", f"{tmp_path}/text/1.txt")
    )
    manifest = prepare(with_variable, tmp_path / "out", silent)
    assert prepare(with_path, tmp_path / "out", silent) == manifest
    with pytest.raises(ConfigError, match=r"data\.paths: prepared with \['\$OVERNIGHT_TEST/text'\], now asked for"):
        prepare(another, tmp_path / "out", silent)
