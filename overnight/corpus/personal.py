"""Mask what points to a person: e-mail addresses, telephone numbers, public IP addresses. Patterns are careful rather than complete, and linear."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence

PLACEHOLDERS = {"email": "[email]", "phone": "[phone]", "ip": "[ip]"}

_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}(?![\w-])")
# The first character comes first and the look-behind after it: a pattern that begins with a look-behind is tried at every character.
_PHONE = re.compile(
    r"[+(0-9](?<![\w\].+/$€£#-].)(?:"
    r"(?<=\+)[1-9](?:[ .()/-]{0,2}[0-9]){7,14}"  # its country: +49 30 1234567
    r"|(?<=\()[0-9]{3}\) ?[0-9]{3}[-.][0-9]{4}"  # an area, as in North America: (555) 123-4567, 555-123-4567, 1-555-123-4567
    r"|(?<=[0-9])[0-9]{2}[-. ][0-9]{3}[-.][0-9]{4}"
    r"|(?<=1)[ .-]\(?[0-9]{3}\)?[-. ][0-9]{3}[-.][0-9]{4}"
    r"|(?<=\()0[0-9]{1,4}\) ?[0-9]{3,4}[ -]?[0-9]{3,5}"  # a zero: (020) 7946 0958, 030/1234567
    r"|(?<=0)[0-9]{2,4}[ /-][0-9]{3,4}[ -]?[0-9]{3,5}"
    r"|(?:(?<=[Tt]el\. .)|(?<=[Tt]el: .)|(?<=[Pp]hone: .)|(?<=[Ff]ax: .))[0-9]{2,4}[ /-]?[0-9]{3,8}"  # a word
    r")(?![\w+@-]|[./ ](?:[0-9]|\[(?:phone|ip)\]))"  # what is masked already ends a number as its digits did, so one pass finds all
)
_IPV4 = re.compile(r"(?<![\w.\]-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.\]])[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:-]|\.\w)")
# A number with three dots after these is a version or a section.
_NUMBERED = re.compile(
    r"(?:\b(?:v|ver|version|versions|release|releases|section|sections|sect?|chapter|rev|revision|build|firmware|update|rfc)\.?|§|[A-Za-z]/) ?$",
    re.I,
)


def mask(text: str, kinds: Sequence[str], counts: Counter[str]) -> str:
    """Return a text with personal data replaced by placeholders; what it returns it would return again.

    An IP address is one that is routed, so none of a private network, and none of four single digits or after "version" and the like. A telephone number
    has its country, or an area as it is written in North America, or begins with a zero in groups; dates, years, prices and ISBN have none of these.

    Args:
        text: clean text.
        kinds: `email`, `phone`, `ip`.
        counts: gets how many there were of each kind.
    """
    before = ""
    while before != text:  # most often once; twice where there was one
        before = text
        if "email" in kinds and "@" in text:
            text = _replaced(_EMAIL, "email", text, counts)
        if "phone" in kinds:
            text = _replaced(_PHONE, "phone", text, counts)
        if "ip" in kinds:
            text = _IPV4.sub(lambda match: _address(match, counts), text) if "." in text else text
            text = _IPV6.sub(lambda match: _address(match, counts), text) if ":" in text else text
    return text


def _replaced(pattern: re.Pattern[str], kind: str, text: str, counts: Counter[str]) -> str:
    text, count = pattern.subn(PLACEHOLDERS[kind], text)
    counts[kind] += count
    return text


def _address(match: re.Match[str], counts: Counter[str]) -> str:
    """Return the placeholder for a public address, else what is there."""
    found = match[0]
    try:
        public = ipaddress.ip_address(found).is_global
    except ValueError:
        return found
    single = "." in found and len(found) == 7
    if not public or single or _NUMBERED.search(match.string[max(0, match.start() - 12) : match.start()]):
        return found
    counts["ip"] += 1
    return PLACEHOLDERS["ip"]
