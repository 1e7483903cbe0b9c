"""Of a run of the suite the campaign keeps the exit code, the summary and the tests that failed."""

from __future__ import annotations

from benchmarks.loaded_suite import outcome

OUTPUT = """All checks passed!
....F... [100%]
=========================== short test summary info ============================
FAILED tests/a/test_b.py::test_c[1] - assert 1 == 2
ERROR tests/a/test_d.py::test_e - OSError
1 failed, 5330 passed, 65 skipped, 1 error in 350.00s (0:05:50)
make: *** [Makefile:39: pytest] Error 1
"""


def test_the_tests_that_failed_are_named() -> None:
    found = outcome(2, OUTPUT)
    assert found["tests"] == "1 failed, 5330 passed, 65 skipped, 1 error"
    assert [line.split()[:2] for line in found["failed"]] == [
        ["FAILED", "tests/a/test_b.py::test_c[1]"],
        ["ERROR", "tests/a/test_d.py::test_e"],
    ]


def test_a_run_that_never_came_to_tests_says_so() -> None:
    assert outcome(2, "make: *** [lint] Error 1\n") == {"exit_code": 2, "tests": "none ended", "failed": []}
