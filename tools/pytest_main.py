"""Runs pytest on the files named on the command line, as a Bazel test."""

import os
import pathlib
import sys

import pytest

# Without a file, so that no setting of a folder above the runfiles can matter.
SETTINGS = {
    "strict": "true",
    "filterwarnings": "error::pytest.PytestUnhandledThreadExceptionWarning",
}


def bazel_options(environ: dict[str, str]) -> list[str]:
    """The options that say to pytest what Bazel says through the environment."""
    options = []
    if xml := environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={xml}")
    if expression := environ.get("TESTBRIDGE_TEST_ONLY"):
        options += ["-k", expression]
    if scratch := environ.get("TEST_TMPDIR"):
        options.append(f"--basetemp={pathlib.Path(scratch) / 'pytest'}")
    return options


if __name__ == "__main__":
    base = ["-p", "no:cacheprovider", "-ra", "--color=no", "--rootdir=.", "--config-file=/dev/null"]
    settings = [option for name, value in SETTINGS.items() for option in ("-o", f"{name}={value}")]
    sys.exit(pytest.main(base + settings + bazel_options(dict(os.environ)) + sys.argv[1:]))
