"""Wikitext to plain text: what a reader of the page would read in its paragraphs, lists and headings.

Tables, references, files, categories and templates go, but for the templates of :mod:`wiki_templates`, whose text is part of a sentence.
Each pass is linear in the length of the page, whatever it holds: pages are written by anyone.

1. Comments, elements and tags, which hide what is in them from the rest (:func:`_without_tags`).
2. Brackets: `[[`, `{{` and `{|` are paired first, then rendered from outside in, so that what is dropped is never looked into (:class:`_Brackets`).
3. External links, bold and italic, magic words, entities.
4. Lines: headings, list items, and what is left of broken tables (:func:`_paragraphs`).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from overnight.corpus import markup, wiki_templates

_PREFIXES = """
file image category media fichier bild datei archivo imagen immagine imagem ficheiro arquivo plik grafika bestand afbeelding файл изображение картинка
слика датотека зображення soubor obrázok kuva tiedosto kép fájl dosya resim ファイル 画像 文件 图像 檔案 圖像 파일 그림 ملف صورة קובץ תמונה پرونده تصویر berkas gambar
hình kategorie catégorie categoría categoria kategoria categorie категория категорія kategori kategória luokka カテゴリ 分类 분류 تصنيف קטגוריה رده
"""
HIDDEN_NAMESPACES = frozenset(_PREFIXES.split())
"""Lower-case prefixes of links to files and categories, which show no text of their own: English ones, old names, and those of large Wikipedias."""

# Deeper brackets are dropped with what is in them; MediaWiki expands 40 levels of templates.
_MAX_DEPTH = 40

_TAG = re.compile(r"<(?:(!--)|(/?)([A-Za-z][A-Za-z0-9]*)((?:[\s/\"'][^<>]*)?)>)")
# Elements that go with what is in them; text of a program is no text of a language.
_ELEMENTS = """
ref references math chem ce gallery timeline score graph imagemap hiero inputbox categorytree templatedata mapframe maplink syntaxhighlight source
script style templatestyles indicator section
"""
DROPPED = frozenset(_ELEMENTS.split())
_LITERAL = frozenset(("nowiki", "pre"))
_CLOSING = {name: re.compile("</" + "".join(f"[{c}{c.upper()}]" for c in name) + r"\s*>") for name in DROPPED | _LITERAL}
_BREAKING = re.compile(markup.BREAKING)
_INLINE = re.compile(f"{markup.INLINE}|bdi|bdo|rb|rp|rt|ruby|data|time|link|noinclude|includeonly|onlyinclude|ol|nobr")
# Of unparsed text, what a later pass would take for markup; entities are decoded last of all.
_ESCAPES = {ord(char): f"&#{ord(char)};" for char in "[]{}|='*:!_<>"}
_PARAMETER = re.compile(r"\{\{\{[^{}|]*+(?:\|([^{}]*+))?\}\}\}")
# Text in several scripts or spellings, as Chinese has it: `-{zh-hans:A; zh-hant:B}-`.
_VARIANTS = re.compile(r"-\{([^{}]*+)\}-")

# Of three brackets the first is text. A table begins and ends a line; `|}}` ends a template whose last argument is empty.
# What must stand before a mark is looked for after it: a pattern that begins with a look-behind is tried at every character.
_BRACKET = re.compile(
    r"\[\[(?!\[(?!\[))|\]\]|\{\{(?!\{(?!\{))|\}\}|\{\|(?<![^\n :*#;|>\t]..)(?!\}\})|\|\}(?<![^\n \t]..)(?!\}(?!\}))",
)
_OPENING = {"]]": "[[", "}}": "{{", "|}": "{|"}
_NAME = re.compile(r"[^|{}\[\]\n]*")
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}|simple)(?:-[a-z]+)*")
# Prefixes as short as those of languages, of links that are shown.
_NO_LANGUAGE = frozenset(("doi", "irc", "mw", "rfc", "sep", "wmf"))

_WEB_LINK = re.compile(r"\[(?:(?:https?|ftps?|irc|ircs|news|gopher)?:?//|mailto:|news:|tel:)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]")
_QUOTES = re.compile("'{2,}")
_MAGIC_WORD = re.compile(r"__[^\W\d_a-z]{3,}__")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
# What a template leaves of its surroundings in parentheses: `(, born 1900)`.
_LOST_COMMA = re.compile(r"\([ \t]*[,;][ \t,;]*+(?!\))")
_LOST_COMMA_MARKS = ("(,", "(;", "( ,", "( ;")
_LINE_STARTS = frozenset("=*#:;|{!-")


def plain(text: str, hidden: frozenset[str] = HIDDEN_NAMESPACES) -> str:
    """Return the text of a page: paragraphs of one line or more, a blank line between them, headings as `## Heading`, list items as `* item`.

    Args:
        text: wikitext.
        hidden: lower-case prefixes of links that show nothing, those of files and categories.
    """
    if "<" in text:
        text = _without_tags(text)
    if "{{{" in text:
        text = _PARAMETER.sub(r"\1", text)
    if "-{" in text:
        text = _VARIANTS.sub(_first_variant, text)
    text = _Brackets(text, hidden).rendered()
    if "[" in text:
        text = _WEB_LINK.sub(r"\1", text)
    if "''" in text:
        text = "\n".join(_without_quotes(line) if "''" in line else line for line in text.split("\n"))
    if "__" in text:
        text = _MAGIC_WORD.sub("", text)
    if "(" in text and any(mark in text for mark in _LOST_COMMA_MARKS):
        text = _LOST_COMMA.sub("(", text)
    text = "\n".join(_paragraphs(text))
    return _ENTITY.sub(lambda match: html.unescape(match[0]), text) if "&" in text else text


def _first_variant(match: re.Match[str]) -> str:
    variants = match[1].rpartition("|")[2]
    return variants.partition(";")[0].partition(":")[2] if ":" in variants else variants


def _without_tags(text: str) -> str:
    """Drop comments and elements of no text, escape what is not to be parsed, and put a blank line for tags that break a paragraph."""
    out: list[str] = []
    closings: dict[str, int] = {}  # where the next closing tag of an element begins: looked for once
    at = 0
    while match := _TAG.search(text, at):
        out.append(text[at : match.start()])
        at = match.end()
        name = match[3].lower() if match[3] else ""
        if match[1]:
            end = text.find("-->", at)
            at = end + 3 if end >= 0 else len(text)
            # A comment that has a line for itself goes with that line.
            if text[at : at + 1] == "\n" and (not out[-1] or out[-1][-1] == "\n"):
                at += 1
        elif name in _CLOSING:
            end = -1 if match[2] or match[4].endswith("/") else _closing(text, name, at, closings)
            if end >= 0:
                if name in _LITERAL:
                    inner = text[at:end].translate(_ESCAPES)
                    out.append(inner if name == "nowiki" else f"\n\n{inner}\n\n")
                at = text.index(">", end) + 1
        elif name == "table":
            out.append("\n|}\n" if match[2] else "\n{|\n")
        elif _BREAKING.fullmatch(name):
            out.append("\n\n")
        elif not _INLINE.fullmatch(name):
            out.append(match[0])
    out.append(text[at:])
    return "".join(out)


def _closing(text: str, name: str, at: int, closings: dict[str, int]) -> int:
    """Return where the closing tag of an element begins, -1 where there is none; a reference that was never closed has none."""
    if closings.get(name, 0) < at and closings.get(name) != -1:
        found = _CLOSING[name].search(text, at)
        closings[name] = found.start() if found else -1
    end = closings[name]
    if name == "ref" and end >= 0:
        again = text.find("<ref", at, end)
        # The closing tag is that of the next reference, unless that one is empty (`<ref name="a" />`).
        if again >= 0 and (match := _TAG.match(text, again)) and match[3] == "ref" and not match[4].endswith("/"):
            return -1
    return end


class _Brackets:
    """The brackets of a page: links, templates and tables, paired and rendered."""

    def __init__(self, text: str, hidden: frozenset[str]) -> None:
        self.text, self.hidden = text, hidden
        self.places: list[int] = []
        self.partners: list[int] = []
        """Of an opening bracket the number of the closing one; -1 of all others."""
        self._pair()

    def _pair(self) -> None:
        """Pair brackets: a closing one belongs to the last of its kind, and those that are open above it never close.

        A `]]` closes nothing beyond an open template or table: those weigh more.
        """
        places, partners, stack = self.places, self.partners, []
        unclosed = {"[[": 0, "{{": 0, "{|": 0}
        for number, match in enumerate(_BRACKET.finditer(self.text)):
            bracket = match[0]
            places.append(match.start())
            partners.append(-1)
            if bracket in unclosed:
                stack.append((bracket, number))
                unclosed[bracket] += 1
                continue
            wanted = _OPENING[bracket]
            if not unclosed[wanted] or (bracket == "]]" and stack[-1][0] != "[["):
                continue
            while True:
                found, opening = stack.pop()
                unclosed[found] -= 1
                if found == wanted:
                    partners[opening] = number
                    break

    def rendered(self) -> str:
        """Return the text without brackets."""
        return "".join(self._rendered(0, len(self.places), 0, len(self.text), 0)) if self.places else self.text

    def _rendered(self, first: int, last: int, start: int, end: int, depth: int) -> Iterator[str]:
        """Yield text and what brackets stand for, by turns, from text.

        Args:
            first: number of the first bracket there.
            last: one more than that of the last.
            start: where the text begins.
            end: where it ends.
            depth: brackets around it.
        """
        text, places, partners = self.text, self.places, self.partners
        number = first
        while number < last:
            place, partner = places[number], partners[number]
            before, shown = text[start:place], ""
            start = place + 2
            if partner >= 0:
                start = places[partner] + 2
                if depth < _MAX_DEPTH:
                    bracket = text[place]
                    shown = self._link(number, partner, depth) if bracket == "[" else self._template(number, partner, depth)
                # `a {{dropped}}, b` has no space before its comma.
                if not shown and before[-1:] == " " and text[start : start + 1] in (",", ".", ";", ")"):
                    before = before[:-1]
                number = partner
            yield before
            yield shown
            number += 1
        yield text[start:end]

    def _arguments(self, number: int, partner: int, depth: int) -> list[str]:
        """Return what stands between the bars of a bracket, rendered."""
        arguments: list[list[str]] = [[]]
        parts = self._rendered(number + 1, partner, self.places[number] + 2, self.places[partner], depth + 1)
        for turn, part in enumerate(parts):
            if turn % 2 or "|" not in part:
                arguments[-1].append(part)
                continue
            head, *others = part.split("|")
            arguments[-1].append(head)
            arguments += [[other] for other in others]
        return ["".join(argument) for argument in arguments]

    def _link(self, number: int, partner: int, depth: int) -> str:
        """Return what is shown of a link: its label, else its target."""
        start, end = self.places[number] + 2, self.places[partner]
        target = _NAME.match(self.text, start, end)
        assert target is not None
        prefix, colon, _ = target[0].partition(":")
        if colon and prefix:
            prefix = prefix.strip()
            if prefix.lower() in self.hidden or (_LANGUAGE.fullmatch(prefix) and prefix not in _NO_LANGUAGE):
                return ""
            if prefix in ("http", "https"):  # a link to the web in brackets
                return f"[{self.text[start:end]}]"
        if partner == number + 1:
            page, bar, label = self.text[start:end].partition("|")
        else:
            arguments = self._arguments(number, partner, depth)
            page, bar, label = arguments[0], "|" if arguments[1:] else "", "|".join(arguments[1:])
        return label if bar and label.strip() else page.removeprefix(":")

    def _template(self, number: int, partner: int, depth: int) -> str:
        """Return what a template stands for: mostly nothing. A table is nothing too, but ends a paragraph."""
        start, end = self.places[number] + 2, self.places[partner]
        if self.text[start - 1] == "|":
            return "\n\n"
        name = _NAME.match(self.text, start, end)
        assert name is not None
        render = wiki_templates.find(name[0])
        return render(self._arguments(number, partner, depth)) if render else ""


def _without_quotes(line: str) -> str:
    """Drop the marks of bold and italic in a line, and keep apostrophes: `l'''amour''` is `l'amour`."""
    runs = [len(run) for run in _QUOTES.findall(line)]
    # Four are an apostrophe and three, more than five apostrophes and five. If neither bold nor italic ends, one bold mark is an apostrophe and two.
    bold = sum(run in (3, 4) or run >= 5 for run in runs) % 2
    italic = sum(run == 2 or run >= 5 for run in runs) % 2
    spare = bold and italic

    def shown(match: re.Match[str]) -> str:
        nonlocal spare
        run = len(match[0])
        if run == 3 and spare and line[match.start() - 1 : match.start()].strip():
            spare = 0
            return "'"
        return "'" if run == 4 else "'" * max(run - 5, 0)

    return _QUOTES.sub(shown, line)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield lines; a heading or list item has blank lines around it, a heading without text below it goes."""
    headings: list[tuple[int, str]] = []
    for line in text.split("\n"):
        line = line.strip()
        start = line[:1]
        if start in _LINE_STARTS and start:
            if start == "=" and (level := _level(line)):
                while headings and headings[-1][0] >= level:
                    headings.pop()
                if title := line[level:-level].strip():
                    headings.append((level, title))
                yield ""
                continue
            if start == "|" or line[:2] in ("{|", "!!") or not line.strip("-"):
                yield ""
                continue
            if start in "*#:;":
                item = line.lstrip("*#:; \t")
                yield ""
                if not item:
                    continue
                line = f"* {item}" if start in "*#" else item
        if line:
            for level, title in headings:
                yield f"\n{'#' * level} {title}\n"
            headings.clear()
        yield line


def _level(line: str) -> int:
    """Return the level of a heading, 1 to 6, or 0."""
    if line[-1] != "=" or len(line) < 3:
        return 0
    left, right = len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("="))
    return 0 if left == len(line) else min(left, right, 6)
