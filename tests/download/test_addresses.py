"""Addresses are shown without what is secret in them, and a mirror stands for every publisher."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.download.addresses import mirror_of, shown
from overnight.download.connection import Source
from overnight.errors import ConfigError, DataError
from tests.download.conftest import Get, Pauses
from tests.download.server import Site, serving, status

WORDS = st.text("abcXYZ019!$%&@:/", min_size=6, max_size=12)


@given(user=WORDS, password=WORDS)
def test_no_password_and_no_key_is_shown(user: str, password: str) -> None:
    secret = f"{quote(user, safe='')}:{quote(password, safe='')}"
    text = shown(f"https://{secret}@data.example.org:8080/a/b.gz?key={quote(password, safe='')}#{quote(password, safe='')}")
    assert text == "https://data.example.org:8080/a/b.gz?..."
    mirror = mirror_of(f"https://{secret}@data.example.org/a/", "--mirror")
    assert mirror and mirror.root == "https://data.example.org/a" and mirror.authorization.startswith("Basic ")
    assert password not in repr(mirror) and mirror.authorization not in repr(mirror)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ftp://user:secret@data.example.org", "ftp://data.example.org: must begin with https"),
        ("https://user:secret@", "must begin with https"),
        ("https://user:secret@data.example.org/?key=secret", "without [?]"),
        ("https://user:secret@data.example.org:port/", "is not an address"),
        ("https://[user:secret@", "is not an address"),
        ("absent/folder", "is neither a folder nor an address"),
    ],
)
def test_what_is_no_mirror_is_refused_without_repeating_its_password(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as raised:
        mirror_of(text, "OVERNIGHT_MIRROR")
    assert "secret" not in str(raised.value) and "OVERNIGHT_MIRROR" in str(raised.value)


def test_no_mirror_is_none() -> None:
    assert mirror_of("", "--mirror") is None


def test_a_server_has_a_file_at_its_host_and_path(tmp_path: Path) -> None:
    mirror = mirror_of("http://127.0.0.1:1/below", "--mirror")
    assert mirror and mirror.place("https://data.example.org/a/b%20c.gz?x=1") == "http://127.0.0.1:1/below/data.example.org/a/b%20c.gz"


def test_a_folder_has_a_file_at_its_host_and_path_or_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "data.example.org" / "a").mkdir(parents=True)
    (tmp_path / "data.example.org" / "a" / "b c.gz").write_bytes(b"1")
    (tmp_path / "d.gz").write_bytes(b"2")
    mirror = mirror_of(str(tmp_path), "--mirror")
    assert mirror
    places = [mirror.place(f"https://data.example.org/a/{name}") for name in ("b%20c.gz", "d.gz", "e.gz")]
    below = tmp_path / "data.example.org" / "a"
    assert places == [below / "b c.gz", tmp_path / "d.gz", below / "e.gz"]


@pytest.mark.parametrize("address", ["http://data.example.org/a", "file:///etc/passwd", "ftp://data.example.org/a", "data.example.org/a"])
def test_without_a_mirror_only_https_is_spoken(address: str, pauses: Pauses) -> None:
    with pytest.raises(DataError, match="is not https"):
        Source(None, 1.0, pauses).open(address)


@pytest.fixture
def certified(site: Site, tmp_path: Path) -> Iterator[tuple[Site, Path]]:
    """A server of https, and its certificate, which nobody vouches for."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(Site({"/data.example.org/a": b"content"}), context) as found:
        yield found, certificate


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(certified: tuple[Site, Path], pauses: Pauses) -> None:
    source = Source(mirror_of(certified[0].address, "--mirror"), 5.0, pauses)
    with pytest.raises(DataError, match="its certificate cannot be trusted"):
        source.open("https://data.example.org/a")
    assert not certified[0].asked


def test_a_mirror_of_https_does_not_lead_to_http(
    certified: tuple[Site, Path], pauses: Pauses, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure, certificate = certified
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    source = Source(mirror_of(secure.address, "--mirror"), 5.0, pauses)
    answer = source.open("https://data.example.org/a")
    assert answer.read(10) == b"content"
    answer.close()
    secure.faults["/data.example.org/a"] = [status(302, Location=f"{site.address}/a")]
    with pytest.raises(DataError, match=f"{site.address}/a: is not https"):
        source.open("https://data.example.org/a")
    assert not site.asked


def test_the_password_of_a_mirror_goes_to_the_mirror_alone(site: Site, pauses: Pauses) -> None:
    site.password = "user:secret"
    with serving(Site({"/a": b"elsewhere"})) as other:
        site.files["/data.example.org/a"] = b"here"
        source = Source(mirror_of(site.address.replace("//", "//user:secret@"), "--mirror"), 5.0, pauses)
        assert source.open("https://data.example.org/a").read(10) == b"here"
        site.faults["/data.example.org/a"] = [status(302, Location=f"{other.address}/a")]
        assert source.open("https://data.example.org/a").read(10) == b"elsewhere"
        assert "Authorization" in site.asked[-1][1] and "Authorization" not in other.asked[0][1]


def test_a_password_without_a_user_goes_to_the_mirror(site: Site, pauses: Pauses) -> None:
    site.password, site.files["/data.example.org/a"] = ":token", b"here"
    source = Source(mirror_of(site.address.replace("//", "//:token@"), "--mirror"), 5.0, pauses)
    assert source.open("https://data.example.org/a").read(10) == b"here"


def test_an_error_of_a_mirror_does_not_show_its_password(get: Get, site: Site, monkeypatch: pytest.MonkeyPatch, pauses: Pauses) -> None:
    site.password = "user:secret"
    source = Source(mirror_of(site.address.replace("//", "//user:wrong@"), "--mirror"), 5.0, pauses)
    with pytest.raises(DataError, match="answers 401 Unauthorized") as raised:
        source.open("https://data.example.org/a")
    assert "wrong" not in str(raised.value)
