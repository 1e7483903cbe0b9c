"""Templates of Wikipedia that stand for words of a sentence, and the words. All others are dropped.

Names are those of the English Wikipedia; many others have the same (`lang`, `nowrap`, `convert`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Render = Callable[[list[str]], str]
"""Of the arguments, the first of which is the name, the text."""

_NAMED = re.compile(r"\s*[\w -]{1,40}=")
_TEXT_KEYS = ("text", "content", "quote", "1", "2")


def find(name: str) -> Render | None:
    """Return what renders a template; None where it is to be dropped."""
    name = " ".join(name.replace("_", " ").split()).lower()
    render = _TABLE.get(name)
    if render or (":" not in name and not name.startswith("lang-")):
        return render
    return _TABLE["nowrap"] if name.startswith("lang-") else _FUNCTIONS.get(name.partition(":")[0])


def _split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return positional and named arguments; `1=` is a position too."""
    positions: list[str] = []
    named: dict[str, str] = {}
    for argument in arguments[1:]:
        if _NAMED.match(argument):
            key, _, value = argument.partition("=")
            named[key.strip().lower()] = value.strip()
        else:
            positions.append(argument.strip())
    while (key := str(len(positions) + 1)) in named:
        positions.append(named[key])
    return positions, named


def _argument(number: int) -> Render:
    def render(arguments: list[str]) -> str:
        positions, named = _split(arguments)
        if len(positions) >= number:
            return positions[number - 1]
        return named.get(str(number)) or named.get("text") or ""

    return render


def _constant(text: str) -> Render:
    return lambda _: text


def _block(arguments: list[str]) -> str:
    """Render a quotation as paragraphs of its own."""
    positions, named = _split(arguments)
    text = next((named[key] for key in _TEXT_KEYS if named.get(key)), positions[0] if positions else "")
    return f"\n\n{text}\n\n"


def _items(arguments: list[str]) -> str:
    """Render a list, each item a line."""
    return "\n" + "\n".join(f"* {item}" for item in _split(arguments)[0]) + "\n"


_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
_RANGES = {
    "-": "–",
    "–": "–",
    "to": " to ",
    "and": " and ",
    "or": " or ",
    "x": " × ",
    "×": " × ",
    "by": " by ",
    "+": " + ",
    "to(-)": " to ",
    "and(-)": " and ",
}
# Codes of units that are not what is shown; most are.
_UNITS = {
    "sqmi": "sq mi",
    "sqft": "sq ft",
    "ft2": "sq ft",
    "sqkm": "km²",
    "km2": "km²",
    "m2": "m²",
    "cm2": "cm²",
    "m3": "m³",
    "cuft": "cu ft",
}
_UNITS |= {"C": "°C", "F": "°F"}


def _convert(arguments: list[str]) -> str:
    """Render the measure that was given: `{{convert|5|to|10|km|mi}}` is 5 to 10 km."""
    positions, _ = _split(arguments)
    text, wants_number = "", True
    for argument in positions:
        if wants_number and argument[:1] not in "0123456789.,-−+⁄/":
            break
        if wants_number:
            text += argument
        elif argument in _RANGES:
            text += _RANGES[argument]
        else:
            text += f" {_UNITS.get(argument, argument)}"
            # Feet and inches: another number and unit follow.
            rest = positions[positions.index(argument) + 1 :]
            if argument in ("ft", "lb", "st") and len(rest) > 1 and rest[0].isdecimal() and rest[1] in ("in", "oz", "lb"):
                text += f" {rest[0]} {rest[1]}"
            break
        wants_number = not wants_number
    return text


def _fraction(arguments: list[str]) -> str:
    parts = _split(arguments)[0]
    if len(parts) == 3:
        return f"{parts[0]} {parts[1]}/{parts[2]}"
    return "/".join(parts) if len(parts) == 2 else f"1/{parts[0]}" if parts else ""


def _value(arguments: list[str]) -> str:
    """Render a number with its error, power and unit: `{{val|5|2|u=km}}` is 5±2 km."""
    positions, named = _split(arguments)
    text = "±".join(positions[:2])
    text += f"×10^{named['e']}" if named.get("e") else ""
    unit = named.get("u") or named.get("ul") or named.get("up") or ""
    return f"{named.get('p', '')}{text}{' ' if unit else ''}{unit}"


def _before(text: str) -> Render:
    argument = _argument(1)
    return lambda arguments: f"{text}{argument(arguments)}"


def _around(left: str, right: str) -> Render:
    argument = _argument(1)
    return lambda arguments: f"{left}{argument(arguments)}{right}"


def _joined(separator: str) -> Render:
    return lambda arguments: separator.join(_split(arguments)[0])


def _foreign(arguments: list[str]) -> str:
    """Render a word with its script and transcription: `{{nihongo|English|kanji|romaji}}`."""
    positions = [position for position in _split(arguments)[0][:3] if position]
    return positions[0] + (f" ({', '.join(positions[1:])})" if positions[1:] else "") if positions else ""


def _ship(prefix: str) -> Render:
    """Render the name of a ship with its number, where that is shown: `{{USS|Enterprise|CVN-65}}`."""

    def render(arguments: list[str]) -> str:
        name, number, shown = [*_split(arguments)[0], "", "", ""][:3]
        return f"{prefix} {name}" + (f" ({number})" if number and shown not in ("2", "6") else "")

    return render


def _as_of(arguments: list[str]) -> str:
    positions, named = _split(arguments)
    if "alt" in named:
        return named["alt"]
    words = [
        _MONTHS[int(part) - 1] if place == 1 and part.isdecimal() and 0 < int(part) < 13 else part
        for place, part in enumerate(positions[:3])
    ]
    lead = "as of" if named.get("lc") in ("y", "yes", "1") else "As of"
    return " ".join([lead, *reversed(words)])


def _function(change: Callable[[str], str]) -> Render:
    """Render a parser function, whose first argument follows a colon: `{{lc:TEXT}}`."""
    return lambda arguments: change(arguments[0].partition(":")[2].strip())


def _names(names: str, render: Render) -> dict[str, Render]:
    return dict.fromkeys((name.strip() for name in names.split(",")), render)


# Templates that show their first argument, in some style; and their second, after a language, color or file.
_FIRST = """
nowrap, nobr, nobreak, no wrap, nowraplinks, nwr, small, smaller, big, larger, large, midsize, center, underline, strike, s, del, ins, sub, sup, em, strong, nobold, noitalic, normal,
smallcaps, small caps, sc, allcaps, all caps, tt, mono, monospace, code, codes, kbd, key press, key, samp, var, mvar, math, dfn, abbr, abbrlink, tooltip, sic, not a typo, typo,
as written, proper name, visible anchor, vanchor, linktext, ill, interlanguage link, illm, ill2, link-interwiki, flag, flagcountry, flagu, unicode, polytonic, iast, hebrew, script/hebrew,
script/arabic, script/greek, script/cyrillic, script/nastaliq, chem name, chem2, ce, vr, plainlist, flatlist, columns-list
"""
_SECOND = "lang, langx, rtl-lang, script, wikt-lang, color, font color, fontcolor, resize, font, hover title, audio"
_QUOTATIONS = "quote, blockquote, block quote, cquote, quotation, bq, quote box, quotebox, pull quote, centered pull quote, rquote, poemquote, poem quote"

_TABLE: dict[str, Render] = {
    **_names("convert, cvt", _convert),
    **_names("val", _value),
    **_names("frac, fraction, sfrac", _fraction),
    **_names(_FIRST, _argument(1)),
    **_names(_SECOND, _argument(2)),
    **_names(_QUOTATIONS, _block),
    **_names("transl, transliteration, tlit", lambda arguments: (_split(arguments)[0] or [""])[-1]),
    **_names("nihongo, nihongo foot", _foreign),
    **_names("unbulleted list, ubl, bulleted list, ordered list, hlist", _items),
    **_names("as of, asof", _as_of),
    **_names("circa, c., ca.", lambda arguments: "c. " + " – c. ".join(_split(arguments)[0][:2])),
    **_names("floruit, fl, fl.", _before("fl. ")),
    **_names("reign, r.", lambda arguments: "r. " + "–".join(_split(arguments)[0][:2])),
    **_names("gaps, chem", _joined("")),
    **_names("e, esp", _before("×10^")),
    **_names("angbr, angle bracket, angle brackets", _around("⟨", "⟩")),
    **_names("gloss, sq", _around("‘", "’")),
    **_names("bracket, sqbr", _around("&#91;", "&#93;")),
    **_names("brace, braces", _around("&#123;", "&#125;")),
    **_names("abs", _around("&#124;", "&#124;")),
    **_names("us$, usd", _before("US$")),
    **_names("a$, aud", _before("A$")),
    **_names("£, gbp, pound sterling", _before("£")),
    **_names("€, eur, euro", _before("€")),
    **_names("¥, jpy, yen", _before("¥")),
    **_names("inr, indian rupee, ₹", _before("₹")),
    **_names("uss", _ship("USS")),
    **_names("hms", _ship("HMS")),
    **_names("ss", _ship("SS")),
    **_names("rms", _ship("RMS")),
    **_names("hmas", _ship("HMAS")),
    **_names("hmcs", _ship("HMCS")),
    **_names("ship", lambda arguments: _ship((_split(arguments)[0] or [""])[0])(arguments[1:]).strip()),
    **_names("!", _constant("&#124;")),
    **_names("=", _constant("&#61;")),
    **_names("', `, ’", _constant("&#39;")),
    **_names("'s", _constant("&#39;s")),
    **_names("\"', \" '", _constant('"&#39;')),
    **_names("'\", ' \"", _constant('&#39;"')),
    **_names("snd, spnd, spaced ndash, spaced en dash, sndash, spaced endash, dash", _constant(" – ")),
    **_names("ndash, –, en dash", _constant("–")),
    **_names("mdash, —, em dash, mdashb", _constant("—")),
    **_names("spaced mdash, spaced em dash", _constant(" — ")),
    **_names("nbsp, space, spaces, nbs, thinsp, thin space, hair space", _constant(" ")),
    **_names("·, middot, •, bullet, bull", _constant(" · ")),
    **_names("pi", _constant("π")),
    **_names("sqrt", _before("√")),
    **_names("times, ×", _constant("×")),
    **_names("±", _before("±")),
    **_names("degree, deg", _constant("°")),
    **_names("hyphen", _constant("-")),
    **_names("ellipsis, ...", _constant("...")),
    **_names("sharp", _constant("♯")),
    **_names("flat", _constant("♭")),
    **_names("break, br, crlf, paragraph break, paragraph, pb", _constant("\n\n")),
}
"""By name, in lower case."""

_FUNCTIONS: dict[str, Render] = {
    "formatnum": _function(str),
    "lc": _function(str.lower),
    "uc": _function(str.upper),
    "lcfirst": _function(lambda text: text[:1].lower() + text[1:]),
    "ucfirst": _function(lambda text: text[:1].upper() + text[1:]),
    "nowrap": _function(str),
}
"""Parser functions, by what stands before their colon."""
