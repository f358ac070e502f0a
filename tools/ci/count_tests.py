"""Counts the test cases of a Bazel run: prints `N passed, N failed[, N skipped]`.

Usage: count_tests.py EVENTS, what `bazel test --build_event_json_file` wrote.

A target whose report lists cases (pytest's do) counts as many; any other counts
as one. A target that Bazel calls failed never counts as none: what it could not
report, a build error or a timeout, is one failure. Exits 1 if anything failed or
nothing passed.
"""

import collections
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

Counts = collections.Counter[str]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the build events; none if Bazel wrote no file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def count_report(path: Path) -> Counts:
    """Counts the cases of one test.xml."""
    counts: Counts = collections.Counter()
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return counts
    for case in cases:
        tags = {element.tag for element in case}
        if tags & {"error", "failure"}:
            counts["failed"] += 1
        elif "skipped" in tags:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def count_target(passed: bool, reports: list[Path]) -> Counts:
    """Counts the cases of one test target, in agreement with Bazel's verdict on it."""
    counts: Counts = sum((count_report(report) for report in reports), collections.Counter())
    if passed and not counts.total():
        counts["passed"] = 1
    if not passed and not counts["failed"]:
        counts["failed"] = 1
    return counts


def count_run(events: Iterator[dict[str, Any]]) -> Counts:
    """Counts the cases of all test targets of a run."""
    reports: dict[str, list[Path]] = collections.defaultdict(list)
    verdicts: dict[str, bool] = {}
    for event in events:
        identity = event["id"]
        if "testResult" in event and "testResult" in identity:
            for output in event["testResult"].get("testActionOutput", []):
                if output["name"] == "test.xml":
                    path = Path(unquote(urlparse(output["uri"]).path))
                    reports[identity["testResult"]["label"]].append(path)
        elif "testSummary" in event:
            status = event["testSummary"]["overallStatus"]
            verdicts[identity["testSummary"]["label"]] = status == "PASSED"
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            verdicts.setdefault(identity["targetCompleted"]["label"], False)
    counts: Counts = collections.Counter()
    for label, passed in verdicts.items():
        counts += count_target(passed, reports[label])
    return counts


def main(path: Path) -> int:
    """Prints the closing line; returns the exit status."""
    counts = count_run(read_events(path))
    line = f"{counts['passed']} passed, {counts['failed']} failed"
    if counts["skipped"]:
        line += f", {counts['skipped']} skipped"
    print(line)
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
