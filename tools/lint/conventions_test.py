"""Rules of CONTRIBUTING.md that a program can check, over the source tree."""

import os
import re
from pathlib import Path

import pytest

from tools.lint import source_tree

CODE = ("*.py", "*.bzl", "*.c", "*.cc", "*.cu", "*.cuh", "*.h", "*.sh")
BUILD_FILES = ("WORKSPACE", "*.bazel", "*.bzl", "*.in", "*lock.txt", "*lock.json", "bazelw", "run")
TEXT = (*CODE, *BUILD_FILES, "*.md", "*.toml", "*.txt")
MOST_LINES = 600


def lines_that_match(pattern, *names, under=""):
    """["file:line: text", ...] of the lines that match, in the files so named."""
    expression = re.compile(pattern)
    found = []
    for path in source_tree.matching(*names):
        if not path.is_relative_to(under):
            continue
        text = (source_tree.root() / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if expression.search(line):
                found.append(f"{path}:{number}: {line.strip()}")
    return found


def test_packages_are_named_and_never_located():
    assert lines_that_match(r"https?:/[/]", *BUILD_FILES) == []


def test_no_file_names_a_folder_of_some_machine():
    folders = r"(^|[^A-Za-z0-9_.$}/])/(home|root|opt|w[o]rk)/[a-z]"
    assert lines_that_match(folders, *TEXT) == []


def test_no_file_is_unfinished():
    marks = r"\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b"
    assert lines_that_match(marks, *TEXT) == []


@pytest.mark.parametrize("path", source_tree.matching(*CODE), ids=str)
def test_a_file_has_one_idea(path):
    lines = (source_tree.root() / path).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES


def test_native_code_reads_no_environment():
    assert lines_that_match(r"\b(secure_)?getenv\b|\benviron\b", *CODE, under="native") == []


def test_native_code_knows_no_python_and_no_torch():
    headers = r"^#include [<\"](Python\.h|nanobind/|pybind11/|torch/|ATen/|c10/)"
    assert lines_that_match(headers, *CODE, under="native") == []


def test_nanobind_appears_in_the_bindings_alone():
    found = lines_that_match(r"^#include <nanobind/", *CODE)
    assert found
    assert [line for line in found if not line.startswith("python/bindings/")] == []


def test_every_module_is_type_checked():
    # This test has the deps of mypy_test, so its runfiles are what mypy sees.
    runfiles = Path(os.environ["TEST_SRCDIR"]) / os.environ["TEST_WORKSPACE"]
    modules = [
        path
        for path in source_tree.matching("*.py")
        if path.parts[0] in ("python", "tools") and not path.name.endswith("_test.py")
    ]
    assert [str(path) for path in modules if not (runfiles / path).exists()] == []


def test_every_package_with_tests_is_in_a_suite_of_tests():
    suites = (source_tree.root() / "tests/BUILD.bazel").read_text()
    forgotten = []
    for path in source_tree.matching("BUILD.bazel"):
        has_tests = "_test(" in (source_tree.root() / path).read_text()
        if has_tests and path.parts[0] != "tests" and f'"//{path.parent}:tests"' not in suites:
            forgotten.append(str(path.parent))
    assert forgotten == []
