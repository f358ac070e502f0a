import json

import pytest

from tools.ci import count_tests

PYTEST_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure>no</failure></testcase>
<testcase name="d"><error>no</error></testcase>
<testcase name="e"><skipped/></testcase>
</testsuite></testsuites>"""
BAZEL_REPORT = '<testsuites><testsuite><testcase name="t"/></testsuite></testsuites>'


class Run:
    """Writes the events that Bazel writes about test targets."""

    def __init__(self, folder):
        self.folder = folder
        self.events = [{"id": {"started": {}}, "started": {"command": "test"}}]

    def target(self, label, status, report=None):
        outputs = [{"name": "test.log", "uri": "file:///nowhere/test.log"}]
        if report is not None:
            path = self.folder / f"{len(self.events)} test.xml"
            path.write_text(report)
            outputs.append({"name": "test.xml", "uri": path.as_uri()})
        result = {"status": status, "testActionOutput": outputs}
        self.events.append({"id": {"testResult": {"label": label}}, "testResult": result})
        summary = {"overallStatus": status}
        self.events.append({"id": {"testSummary": {"label": label}}, "testSummary": summary})

    def unbuilt(self, label):
        self.events.append({"id": {"targetCompleted": {"label": label}}, "completed": {}})

    def unreached(self, label):
        aborted = {"reason": "ANALYSIS_FAILURE"}
        self.events.append({"id": {"targetCompleted": {"label": label}}, "aborted": aborted})

    def finish(self, capsys):
        path = self.folder / "events.json"
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        status = count_tests.main(path)
        return status, capsys.readouterr().out


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_cases_are_counted_one_by_one(run, capsys):
    run.target("//a:a", "FAILED", PYTEST_REPORT)
    run.target("//b:b", "PASSED", BAZEL_REPORT)
    assert run.finish(capsys) == (1, "3 passed, 2 failed, 1 skipped\n")


def test_all_passed(run, capsys):
    run.target("//a:a", "PASSED", BAZEL_REPORT)
    run.target("//b:b", "PASSED")
    assert run.finish(capsys) == (0, "2 passed, 0 failed\n")


@pytest.mark.parametrize("status", ["FAILED", "TIMEOUT", "NO_STATUS", "FLAKY", "INCOMPLETE"])
@pytest.mark.parametrize("report", [None, BAZEL_REPORT, "<testsuites><testsu"])
def test_a_target_that_did_not_pass_is_a_failure(run, capsys, status, report):
    run.target("//b:b", "PASSED", BAZEL_REPORT)
    run.target("//a:a", status, report)
    exit_status, line = run.finish(capsys)
    assert exit_status == 1
    assert "1 failed" in line


def test_what_could_not_be_built_is_a_failure(run, capsys):
    run.target("//b:b", "PASSED", BAZEL_REPORT)
    run.unbuilt("//a:a")
    run.unreached("//c:c")
    assert run.finish(capsys) == (1, "1 passed, 2 failed\n")


def test_no_test_is_a_failure(run, capsys):
    assert run.finish(capsys) == (1, "0 passed, 0 failed\n")


def test_only_skipped_is_a_failure(run, capsys):
    report = '<testsuite><testcase name="a"><skipped/></testcase></testsuite>'
    run.target("//a:a", "PASSED", report)
    assert run.finish(capsys) == (1, "0 passed, 0 failed, 1 skipped\n")


def test_no_event_file_is_a_failure(tmp_path, capsys):
    assert count_tests.main(tmp_path / "absent.json") == 1
    assert capsys.readouterr().out == "0 passed, 0 failed\n"
