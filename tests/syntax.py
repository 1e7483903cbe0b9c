"""What the tests of the source text share: each text is parsed once in a process."""

from __future__ import annotations

import ast
import functools
import io
import tokenize


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of a module, itself first."""
    return tuple(ast.walk(ast.parse(text)))


def comments(text: str) -> list[str]:
    """The comments of a module."""
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]


def possible_comments(text: str) -> str:
    """All of a module that may be a comment, and strings with a # in them: found in a hundredth of the time that tokens take."""
    return "\n".join(line[line.index("#") :] for line in text.splitlines() if "#" in line)


def docstring(text: str) -> str | None:
    """The docstring of a module, without parsing what follows it where its end is plain."""
    end = text.find('"""\n', 3) + 3
    return ast.get_docstring(ast.parse(text[:end] if text.startswith('"""') and end > 3 else text))
