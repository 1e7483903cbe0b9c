"""Paragraphs to sentences."""

from __future__ import annotations

import re

# Unicode's Sentence_Terminal (PropList.txt of Unicode 14) above ASCII: the stops of Armenian, Arabic, Urdu, Syriac, Devanagari, Burmese, Ethiopic,
# Khmer and so on, and the full-width ones; and the ellipsis, and the Greek question mark, which NFC makes a semicolon.
_TERMINALS = (
    "\u037e\u2026\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803"
    "\u1809\u1944\u1945\u1aa8-\u1aab\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d\u1b7e\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u2e2e\u2e3c\u2e53"
    "\u2e54\u3002\ua4ff\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe52\ufe56\ufe57"
    "\uff01\uff0e\uff1f\uff61"
)
_RARE_TERMINALS = (  # beyond the 16 bits for which a set of characters is one look-up
    "\U00010a56\U00010a57\U00010f55-\U00010f59\U00010f86-\U00010f89\U00011047\U00011048\U000110be-\U000110c1\U00011141-\U00011143\U000111c5"
    "\U000111c6\U000111cd\U000111de\U000111df\U00011238\U00011239\U0001123b\U0001123c\U000112a9\U0001144b\U0001144c\U000115c2\U000115c3"
    "\U000115c9-\U000115d7\U00011641\U00011642\U0001173c-\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b\U00011a9c\U00011c41"
    "\U00011c42\U00011ef7\U00011ef8\U00016a6e\U00016a6f\U00016af5\U00016b37\U00016b38\U00016b44\U00016e98\U0001bc9f\U0001da88"
)
# Those of Chinese and Japanese, with what closes after them, need no white space.
_FULL_WIDTH = "。！？｡．"
_CLOSING = r"\"'”’)\]»*_」』）】》〉"
# After an end comes a space and no small letter; or a small one, as some people begin, after a word too long for an abbreviation.
_BEFORE_NEXT = r"(?= [^a-z])|(?<=[a-z]{5}\.)(?= )"
# A sentence may end at one of these, with closing quotes or brackets, before white space. None is looked for inside of a run of them: where its
# first ends nothing, no other does, and each would be followed to the end of the run.
_END_ASCII = re.compile(rf"[.!?](?<![.!?].)[.!?]*+[\"')\]*_]*(?:{_BEFORE_NEXT})")
# In German “ and « close, where a space follows; in Chinese those below, behind a full-width mark, without one.
_CHINESE = r"[”’】》〉]"
_NEEDS_NO_SPACE = rf"(?<=[{_FULL_WIDTH}」』）])|(?<=[{_FULL_WIDTH}]{_CHINESE})|(?<=[{_FULL_WIDTH}]{_CHINESE}{_CHINESE})"
# In French a space is before the one that closes; what opens has none after it.
_SPACED_CLOSING = r" [»›](?![^ .,;:!?…)])"
_AFTER = rf"[{_CLOSING}]*[“«]?(?:{_SPACED_CLOSING})*+(?:{_BEFORE_NEXT}|{_NEEDS_NO_SPACE})"
_END, _END_RARE = (
    re.compile(f"{mark}(?<!{mark}.){mark}*{_AFTER}") for mark in (f"[.!?{_TERMINALS}]", f"[.!?{_TERMINALS}{_RARE_TERMINALS}]")
)
_GREEK = "\u0370-\u03ff\u1f00-\u1fff"
_GREEK_QUESTION = re.compile(rf";(?<=[{_GREEK}];)(?=[{_CLOSING}]* \W{{0,3}}[{_GREEK}])")
# A point between digits, and a quotation with the particle that makes it a part of its sentence, but not with a word that begins as that does.
_JAPANESE_WITHIN = re.compile(r"(?<=\d)．\d|[」』”’）] ?(?:って|と(?!ころ|にかく|りあえず|ても|きどき|うとう|もかく))")
_RARE = re.compile("[\U00010a00-\U0001ffff]")
_BEFORE_FIRST = " \"'“‘„«([*_-—–¿¡`"
# Unicode calls the letters of Georgian small, since it has capitals for headlines; no sentence begins with one.
_GEORGIAN = ("\u10d0", "\u10ff")

# What a full stop after it does not end a sentence: titles, and words that hardly end one, in lower case.
_ABBREVIATIONS = frozenset(
    " ".join(
        [
            # English
            "mr mrs ms messrs dr drs prof st rev hon pres gov sen rep capt cpt col gen lt sgt maj cmdr adm corp pvt sr jr bros mt ft vs viz cf ca",
            "approx al ed eds trans tr esq supt det insp",
            # German
            "abb bzw bspw bes bzgl ca dipl evtl frl geb gest ggf hl hrsg ing inkl insb jhdt mio mrd nr sog str tel ung vgl zzgl",
            # Russian: "see", "compare", "street", "for example", "professor", "academician", thousands and more
            "акад гл гр доц илл напр обл прим проф св ср стр тыс ул",
            # French
            "av env mlle mlles mme mmes mgr ste",
            # Spanish
            "avda dña dra ee ej excmo gral lic núm pág págs sra sras sres srta ud uds vd vds",
            # Hindi: "doctor", "professor"
            "डॉ प्रो",
        ]
    ).split()
)
_LONG_ABBREVIATIONS = frozenset(word[-5:] for word in _ABBREVIATIONS if len(word) >= 5)
# Those that are an abbreviation before a number only: "no." and "sec." also end sentences.
_BEFORE_NUMBER = frozenset(
    [
        "no",
        "nos",
        "fig",
        "figs",
        "eq",
        "eqs",
        "p",
        "pp",
        "vol",
        "vols",
        "ch",
        "chap",
        "sec",
        "sect",
        "art",
        "par",
        "ver",
        "v",
        "vv",
        "l",
        "ll",
        "n",
        "jan",
        "feb",
        "mar",
        "apr",
        "jun",
        "jul",
        "aug",
        "sept",
        "sep",
        "oct",
        "nov",
        "dec",
        "abs",
        "bd",
        "kap",
        "s",
        "tab",
        "hos",
        "рис",
        "табл",
        "т",
    ]
)
# Abbreviations so long that small letters after them would be taken for the next sentence.
_BEFORE_SMALL = frozenset("approx aprox assoc abbrev trans".split())  # noqa: SIM905
# What hardly follows an initial or an abbreviation with dots, unless as the first word of a sentence: "made in the U.S. It was", "rated R. The film".
_FIRST_WORDS = re.compile(r"(?:The|This|These|That|It|He|She|We|They|There|But|And|In|If|How|What|Why|When|Where|Who|However|Mrs?\.|Dr\.) ")
_NEXT_DOT = re.compile(r" \.+(?!\w)")  # of ". . ."; ".NET" is a word
# Abbreviations that do not end a sentence whatever follows.
_NEVER_LAST = frozenset(["e.g", "i.e", "p.s", "z.b", "d.h", "u.a", "p.ex"])
# Letters that are words, or names of numbers, and so may be the last of a sentence.
_WORDS_OF_ONE_LETTER = frozenset("Iiaxynkяo")
# Small letters that are an abbreviation before a capital too, as "v. Chr.", "s. Abb." and "г. Москва" are; others, as in "of a and c.", are not.
# The last three are Arabic: doctor, professor, engineer.
_BEFORE_CAPITAL = frozenset("svбвгдкпрстدأم")
# What is behind a German ordinal ("3. Mai", "20. Jahrhundert"), or before it ("am 2.", "der 2."); "am" is also English, before a month or not.
_AFTER_ORDINAL = re.compile(
    r"(?:Januar|Jänner|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember|Jahrhundert|Jahrhunderts|Jh|Jhd|Weltkrieg"
    r"|Weltkriegs|Weltkrieges|Auflage|Bundesliga|Januars|Lebensjahr|Klasse)\b"
)
_BEFORE_ORDINAL = frozenset("der dem den des vom zum zur beim im".split())  # noqa: SIM905


def sentences(text: str) -> list[str]:
    """Split cleaned text into sentences.

    A sentence ends at `.`, `!`, `?`, `…` or another sentence terminal of Unicode before a space and something that is not lower case, but not after a
    title, an initial, an abbreviation of one letter ("z. B.") or with dots in it, a German ordinal, nor after `No.` and its like before a number. It
    also ends at a full stop between a word of five letters or more and a small letter, and after an initial or "U.S." before `The` and its like. A
    paragraph always ends one. A semicolon between Greek words is their question mark.

    Args:
        text: what :func:`overnight.corpus.clean.clean` returned.
    """
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        start = 0
        marked, pattern = paragraph, _END_ASCII
        if not paragraph.isascii():
            marked = _GREEK_QUESTION.sub("\u037e", paragraph)
            pattern = _END_RARE if _RARE.search(paragraph) else _END
        for match in pattern.finditer(marked):
            stop, end = match.span()
            # Most ends in few steps: a word longer than nearly all abbreviations, the mark, a capital.
            tail = paragraph[stop - 5 : stop] if stop > 4 else ""
            plain = tail.isalpha() and paragraph[end + 1 : end + 2].isupper() and tail.lower() not in _LONG_ABBREVIATIONS
            if plain or _ends_sentence(marked, start, stop, end):
                found.append(paragraph[start:end])
                start = end + 1 if paragraph[end : end + 1] == " " else end
        if start < len(paragraph):
            found.append(paragraph[start:])
    return found


_TERMINAL = re.compile(f"[.!?{_TERMINALS}{_RARE_TERMINALS}]|;(?<=[{_GREEK}];)")
_CLOSING_QUOTES = ('"', "'", "”", "’", "»", "“", "」", "』")


def ends_like_a_sentence(line: str) -> bool:
    """Return whether a line ends with a mark that ends sentences, within brackets or not, or with a closing quotation mark."""
    stripped = line.rstrip("\"'”’)]»*_」』） ")
    return line.endswith(_CLOSING_QUOTES) or _TERMINAL.match(stripped, len(stripped) - 1) is not None


def _ends_sentence(text: str, start: int, stop: int, end: int) -> bool:
    """Return whether the mark at text[stop:end] ends the sentence that began at start."""
    following = text[end : end + 6].lstrip(_BEFORE_FIRST)[:1]
    if following == "." and _NEXT_DOT.match(text, end):
        return False
    if following.islower() and not _GEORGIAN[0] <= following <= _GEORGIAN[1]:
        return text[end + 1 : end + 2] == following and _ends_before_small(text, start, stop, end)
    if text[end - 1] in "．」』”’）" and _JAPANESE_WITHIN.match(text, end - 1):
        return False
    # Only a single full stop can belong to an abbreviation; a closing quote after it ends the sentence anyway.
    if end - stop != 1 or text[stop] != ".":
        return True
    word = text[max(start, stop - 16) : stop].rpartition(" ")[2].lstrip(_BEFORE_FIRST)
    if len(word) < 3 and (word.isdigit() or word.isalpha()):
        before, after = text[max(start, stop - 16) : stop - len(word)].rstrip(_BEFORE_FIRST), text[end : end + 24].lstrip(_BEFORE_FIRST)
        if word.isdigit():
            return bool(before) and not _is_ordinal(before, after)  # "1. Introduction"
        if before[-1:] == "." and before[-2:-1].isalpha() and not before[-3:-2].isalpha():
            return False  # the second of "u. a." and "p. ex."
        if len(word) == 1:
            return not _is_abbreviated(word, before, after)
    if "." in word:
        if not all(len(part) <= 2 and part.isalpha() for part in word.split(".")):
            return True
        return word.lower() not in _NEVER_LAST and _FIRST_WORDS.match(text, end + 1) is not None  # U.S., e.g., Ph.D.
    if word.isdigit() and stop - start == len(word):
        return False
    lower = word.lower()
    return lower not in _ABBREVIATIONS and not (following.isdigit() and lower in _BEFORE_NUMBER)


def _ends_before_small(text: str, start: int, stop: int, end: int) -> bool:
    """Return whether a full stop before a small letter ends a sentence: of people who begin theirs so, it does after a word that is no abbreviation."""
    word = text[max(start, stop - 24) : stop].rpartition(" ")[2].lstrip(_BEFORE_FIRST)
    if text[stop:end] != "." or not (len(word) >= 5 and word.isascii() and word.isalpha() and word.islower()):
        return False
    return word not in _BEFORE_SMALL and bool(word.strip("ivxlcdm"))  # "Pliny, lib. xxxiii. cap. 3"


def _is_ordinal(before: str, after: str) -> bool:
    """Return whether a number and a full stop belong to what follows: "3. Mai", "der 2. Weltkrieg"."""
    return before.rpartition(" ")[2].lower() in _BEFORE_ORDINAL or _AFTER_ORDINAL.match(after) is not None


def _is_abbreviated(letter: str, before: str, after: str) -> bool:
    """Return whether a letter and a full stop are an initial or an abbreviation ("J. Smith", "z. B.", "г. Москва"), and not the last word of a sentence."""
    if after[1:2] == "." and after[:1].isalpha():
        return True
    if letter in _WORDS_OF_ONE_LETTER:
        return after[:1].isdigit() and letter in _BEFORE_NUMBER
    if letter.isupper() or after.startswith("Chr."):
        return not (before and _FIRST_WORDS.match(after))  # "A. The first" is an item of a list
    # After a number it is a unit or a year's, and may be the last: "5 m.", "1945 г."
    return not before[-1:].isdigit() and (after[:1].isdigit() or letter in _BEFORE_CAPITAL)
