"""The words of the package: docstrings open with a verb, spelling is American, and names that were given up do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

PARTS = ("distributed", "checkpoint", "run_dir", "engine", "batches", "optim", "models", "tasks", "corpus", "finetune", "byte_lm", "bench")
# No docstring of a function opens with one of these: it opens with a verb in the imperative ("Return the ...", "Check that ...").
NO_VERBS = re.compile(
    "A All Also An And Any As At Both Every Each From How If In It Its Most No None Not Nothing Of On One Only Our Some Such That The Their There "
    "These This Those To Two What Whatever When Where Whether Which Who Whose Why With Within Without".replace(" ", "|")
)
# A verb that is in the third person opens none either.
THIRD_PERSON = re.compile(r"(Return|Yield|Write|Read|Raise|Take|Check|Make|Give|Add|Compute|Measure|Keep)s\b")
BRITISH = re.compile(
    r"behaviou|colou?r(?<=our)|favour|neighbour|labell|cancell|catalogue|artefact|centre|spelt|"
    r"(?:optim|normal|token|initial|synchron|amort|final|recogn|minim|maxim|serial|quant|summar|organ|general|parametr)is(?:e|ing|ation|er)",
    re.IGNORECASE,
)
# Names of the program's youth, as parts of an identifier in snake case.
OLD_NAMES = re.compile(
    "(?<![^_])(?:agree|boards|brought|cuts|dealt|elsewhere|featurise|forget|gathered|grain|greatest|halt(?:ed)?|held|hits?|judged?|lanes?|listed|"
    "origin|owed|pace|pieces?|problem_kind|saver|say|span_reader|stood|summing|told|trials|watch(?:ed)?|ways?|wide)(?![^_])"
)
# Where such a part is right: a key of a file has that name.
RIGHT = {"checkpoint.reader": {"watched"}, "engine.pretrain": {"watched"}}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the parts, with their syntax trees."""
    for part in PARTS:
        for path in sorted((ROOT / "overnight" / part).rglob("*.py")):
            yield f"{part}.{path.stem}", ast.parse(path.read_text(encoding="utf-8"))


def no_imperatives(tree: ast.Module) -> list[str]:
    """Return the functions whose docstring does not open with a capitalized verb; a property's says what it is."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
            continue
        if any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list):
            continue
        word = re.split(r"[\s,.:;]", text, maxsplit=1)[0]
        if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) or NO_VERBS.fullmatch(word) or THIRD_PERSON.match(word):
            found.append(f"{node.name}: {text.splitlines()[0]}")
    return found


def identifiers(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to classes, functions, parameters, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def old_names(names: set[str], right: set[str]) -> list[str]:
    """Return the names that have a part that was given up, other than the right ones, or a British one."""
    snake = {name: re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names}
    return sorted(name for name, text in snake.items() if BRITISH.search(text) or set(OLD_NAMES.findall(text)) - right)


def british(tree: ast.Module) -> list[str]:
    """Return the strings, docstrings among them, that have a British spelling."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [match[0] for text in texts if (match := BRITISH.search(text))]


def test_docstrings_of_functions_open_with_an_imperative_verb() -> None:
    assert {name: found for name, tree in modules() if (found := no_imperatives(tree))} == {}


def test_no_name_is_an_old_one_and_no_right_one_is_listed_in_vain() -> None:
    assert {name: found for name, tree in modules() if (found := old_names(identifiers(tree), RIGHT.get(name, set())))} == {}
    trees = dict(modules())
    assert [name for name in RIGHT if not old_names(identifiers(trees[name]), set())] == []


def test_spelling_is_american() -> None:
    assert {name: found for name, tree in modules() if (found := british(tree))} == {}


def test_the_checks_find_what_they_look_for() -> None:
    planted = '''
class Saver:
    """A class may open with a noun."""

    @property
    def size(self):
        """Bytes so far."""

    def judge(self, grain, streams):
        """The score, of normalised examples."""
        self.held_out = lanes = 1


def bytes_left():
    """bytes that are left."""


def reads():
    """Returns what it reads."""


def fine():
    """Return the number of samples."""
'''
    tree = ast.parse(planted)
    assert {text.split(":")[0] for text in no_imperatives(tree)} == {"bytes_left", "reads", "judge"}
    assert old_names(identifiers(tree), set()) == ["Saver", "grain", "held_out", "judge", "lanes"]
    assert old_names(identifiers(tree), {"held", "lanes"}) == ["Saver", "grain", "judge"]
    assert british(tree) == ["normalise"]
    assert old_names({"tokenise_text", "normalize", "SpanReader", "widest", "placeholder"}, set()) == ["SpanReader", "tokenise_text"]
