"""A worker of Triton's kernels in its interpreter, without most of the time that it takes: `python -m tests.interpreter WORKER ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What puts the interpreter's own functions into the language, done once for good.

    The interpreter looks at all names of the language for each call of a function within a kernel, which is two thirds of its time.
    """
    from triton import language

    scopes: dict[tuple[bool, bool], Any] = {}

    def once(function: Any) -> Any:
        values = [id(value) for value in function.__globals__.values()]
        seen = id(language) in values, id(language.core) in values
        if seen not in scopes:
            scopes[seen] = type(patch(function))  # never restored
        return scopes[seen]()

    return once


if __name__ == "__main__":
    from triton.runtime import interpreter

    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
