"""Masking of personal data: what is masked, what only looks like it, and that masking again changes nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus.personal import PLACEHOLDERS, mask

KINDS = tuple(PLACEHOLDERS)

MASKED = [
    ("write to jane.doe+list@mail.example.co.uk, please", "write to [email], please"),
    ("<u_1@example.org>.", "<[email]>."),
    ("call +49 30 1234567 or +1 (555) 123-4567.", "call [phone] or [phone]."),
    ("(555) 123-4567, 555-123-4567, 555.123.4567 and 1-800-555-1234", "[phone], [phone], [phone] and [phone]"),
    ("Tel. 030/1234567, (020) 7946 0958, 089 123456, Tel: 5551234", "Tel. [phone], [phone], [phone], Tel: [phone]"),
    ("from 93.184.216.34 and [8.8.44.1]:80", "from [ip] and [[ip]]:80"),
    ("host 2001:4860:4860::8888 answers", "host [ip] answers"),
    ("of seven characters: 2600::1", "of seven characters: [ip]"),
    ("请把简历和作品集发送到hr1@firma.cn。邮箱是info@x.cn请记住", "请把简历和作品集发送到[email]。邮箱是[email]请记住"),
    ("メールはtaro@example.co.jpまで。อีเมลsomchai@x.co.thครับ", "メールは[email]まで。อีเมล[email]ครับ"),
    ("Пишите наivan@example.ruсегодня. 메일은hr@firma.kr로", "Пишите на[email]сегодня. 메일은[email]로"),
    ("josé.muñoz@example.es, иван.петров@example.ru и 홍길동@example.kr", "[email], [email] и [email]"),
    ("电话+86 138 0013 8000联系, โทร +66 2 123 4567ครับ", "电话[phone]联系, โทร [phone]ครับ"),
    ("IP地址8.8.4.44是公共的, 主机2600::1很快", "IP地址[ip]是公共的, 主机[ip]很快"),
    ("It is 2001:4860:4860::8888. So is 2a00:1450:4001:81b::200e...", "It is [ip]. So is [ip]..."),
]
KEPT = [
    "version 12.34.56.78, v10.20.30.40, Chrome/91.14.47.12 and section 12.13.14.15",
    "section 1.2.3.4; 1.2.3.4.5; 300.12.13.14; 12.13.14",
    "since 8.8.8.8 it has been faster",
    "the addresses 127.0.0.1, 10.11.12.13, 192.168.1.10 and fe80::1ff:fe23 are private",
    "on 2026-11-22, 22.11.2026, 11/22/2026, 1914-1918, from 1900-2000 and at 12:30:45",
    "ISBN 0-306-40615-2, ISBN 978-3-16-148410-0, ISBN 9783161484100, ISSN 1234-5678",
    "$1,234,567.89, 1 234 567 890, 3.14159265358979, 555-1234, 0.123-456 and 007 1234",
    "the decorator @functools.wraps, user@localhost, a@b and price @ 5.00",
    "RFC 2822, 10,000,000 people, 2 + 30 1234567 and std::string a::b",
    "1:2:3, 24:11:03 and John 3:16-18; 100-200-300; 123-45-6789",
    "№ 12345678 and order #555-123-4567",
    "2011年1月1日至2012-12-31，共1,234,567人，价格3.14元，版本12.34.56.78，第12.13.14.15节，时间12:30:45",
    "张三@example.cn, ivan@пример.рф, ٩٣.١٨٤.٢١٦.٣٤",
]


@pytest.mark.parametrize(("text", "expected"), MASKED)
def test_personal_data_is_masked(text: str, expected: str) -> None:
    counts: Counter[str] = Counter()
    assert mask(text, KINDS, counts) == expected
    assert +counts == Counter({kind: expected.count(holder) for kind, holder in PLACEHOLDERS.items() if holder in expected})


@pytest.mark.parametrize("text", KEPT)
def test_numbers_that_are_no_personal_data_stay(text: str) -> None:
    assert mask(text, KINDS, Counter()) == text


def test_only_the_kinds_that_are_asked_for_are_masked() -> None:
    assert mask("a.b@example.org, +49 30 1234567, 93.184.216.34", ["phone"], Counter()) == "a.b@example.org, [phone], 93.184.216.34"


PARTS = [
    "a",
    "b.c",
    "@",
    "x.org",
    ".",
    "+49",
    "+",
    "(",
    ")",
    "555",
    "-",
    "123",
    "4567",
    " ",
    "030",
    "/",
    "93.184",
    ":",
    "2001",
    "]",
    "[",
    "Tel. ",
    "v",
    "é",
    "ж",
    "是",
    "٣",
]


@given(st.text("是。はま。ครับကខ", min_size=1), st.text("是。はまครับကခ"))
def test_no_text_of_a_script_without_spaces_is_masked_with_what_touches_it(before: str, after: str) -> None:
    for found, holder in (("a.b1@example.cn", "[email]"), ("+86 138 0013 8000", "[phone]"), ("93.184.216.34", "[ip]"), ("2600::1", "[ip]")):
        assert mask(f"{before}{found}{after}", KINDS, Counter()) == f"{before}{holder}{after}"


@given(st.lists(st.sampled_from(PARTS), max_size=24).map("".join))
def test_masking_again_changes_nothing(text: str) -> None:
    once = mask(text, KINDS, Counter())
    again: Counter[str] = Counter()
    assert mask(once, KINDS, again) == once
    assert not +again


@pytest.mark.parametrize(
    "part",
    [
        "a.",
        "1.",
        "+1 ",
        "(555) ",
        "2001:",
        "a@",
        "a@b.",
        "@",
        "ж",
        "aж@",
        "0123 ",
        "030/1234567 ",
        "030/1234567.",
        "555-123-4567,",
        "12345",
    ],
)
def test_long_runs_of_what_begins_like_personal_data_take_time_that_grows_with_their_length_only(part: str) -> None:
    text = part * 100_000  # quadratic time would be an hour
    assert len(mask(text, KINDS, Counter())) <= len(text)
