"""Mask what points to a person: e-mail addresses, telephone numbers, public IP addresses. Patterns are careful rather than complete, and linear.

A letter or digit is one of ASCII, so that one of another script may stand beside what is masked: many scripts put no space there.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence

PLACEHOLDERS = {"email": "[email]", "phone": "[phone]", "ip": "[ip]"}

# Before the @ stand Latin letters, or those of other scripts that put spaces between words: of one that does not a name cannot be told from its sentence.
_LATIN = "a-zA-Z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff"
_SPACED = (  # Greek, Cyrillic, Armenian, Hebrew, Arabic, those of India and Sri Lanka, Georgian, Ethiopic, Korean
    "\u0370-\u037d\u0386-\u0481\u048a-\u0556\u0561-\u0587\u05d0-\u05ea\u0620-\u0652\u066e-\u06d3\u0900-\u0963\u0966-\u0df3\u10a0-\u10fa\u10fc-\u10ff"
    "\u1200-\u135f\uac00-\ud7a3"
)
_LOCAL = re.compile("|".join(f"(?<![{letters}0-9_.%+-])[{letters}0-9_.%+-]{{1,64}}\\Z" for letters in (_LATIN, _SPACED)))
_AT = re.compile(r"@(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}(?![\w-])", re.A)
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
    r")(?![\w+@-]|[./ ](?:[0-9]|\[(?:phone|ip)\]))",  # what is masked already ends a number as its digits did, so one pass finds all
    re.A,
)
_IPV4 = re.compile(r"[0-9](?<![\w.\]-].)[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![\w-]|\.[0-9])", re.A)
_IPV6 = re.compile(r"[23](?<![\w:.\]].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:-]|\.\w)", re.A)
# A number with three dots after these is a version or a section; the last ones are Chinese and Japanese.
_NUMBERED = re.compile(
    r"(?:\b(?:v|ver|version|versions|release|releases|section|sections|sect?|chapter|rev|revision|build|firmware|update|rfc)\.?|§|[A-Za-z]/|版本号?|バージョン|第) ?$",
    re.A | re.I,
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
            text = _without_emails(text, counts)
        if "phone" in kinds:
            text, count = _PHONE.subn(PLACEHOLDERS["phone"], text)
            counts["phone"] += count
        if "ip" in kinds:
            text = _IPV4.sub(lambda match: _address(match, counts), text) if "." in text else text
            text = _IPV6.sub(lambda match: _address(match, counts), text) if ":" in text else text
    return text


def _without_emails(text: str, counts: Counter[str]) -> str:
    """Return a text with a placeholder for each address; what is before an @ is read only where an address can end behind it."""
    kept, end = [], 0
    for match in _AT.finditer(text):
        if local := _LOCAL.search(text, max(end, match.start() - 64), match.start()):
            kept += [text[end : local.start()], PLACEHOLDERS["email"]]
            end = match.end()
            counts["email"] += 1
    return "".join([*kept, text[end:]])


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
