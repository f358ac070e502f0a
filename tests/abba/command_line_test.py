"""Flags as abba and the tools share them."""

import os

import pytest

from flashverify.abba.command_line import Flags, HelpRequested
from flashverify.abba.outcome import UsageError


def flags():
    found = Flags("trial", "trial: measures nothing.\n\nflags:\n")
    found.string("name", "", "Any text.")
    found.strings("texts", ["one"], "Several.")
    found.boolean("loud", True, "Loud or not.")
    found.integer("count", 3, "How many.", low=1)
    found.number("wait_s", 5, "Seconds.", low=0.5)
    found.choice("kind", "a", ("a", "b"), "What kind.")
    found.choices("kinds", ("b",), ("a", "b", "c"), "Which kinds.")
    found.quick("Fewer.", count=1, kind="b")
    return found


def values(*arguments):
    found = flags().parse(arguments)
    names = ("name", "texts", "loud", "count", "wait_s", "kind", "kinds")
    return {name: found.value(name) for name in names}


def test_defaults():
    assert values() == {
        "name": "", "texts": ["one"], "loud": True, "count": 3, "wait_s": 5, "kind": "a",
        "kinds": ("b",),
    }  # fmt: skip


def test_what_is_given_is_what_is_found():
    found = values(
        "--name=x y", "--texts=1", "--texts=2", "--noloud", "--count", "7", "--wait_s=0.5",
        "--kind=b", "--kinds=c,a,,c",
    )  # fmt: skip
    assert found == {
        "name": "x y", "texts": ["1", "2"], "loud": False, "count": 7, "wait_s": 0.5, "kind": "b",
        "kinds": ("c", "a"),
    }  # fmt: skip
    assert values("--kinds=")["kinds"] == ()


def test_quick_gives_way_to_what_is_given():
    assert (values("--quick")["count"], values("--quick")["kind"]) == (1, "b")
    assert (values("--quick", "--count=3")["count"], values("--noquick")["kind"]) == (3, "a")


def test_the_command_and_what_of_it_was_given():
    found = flags().parse(["--count=3", "--name", "a b"])
    assert found.command == "trial --count=3 --name 'a b'"
    assert found.given == {"count", "name"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--count=0", "--count=0: accepted are 1 to 2147483647"),
        ("--count=2147483648", "--count=2147483648: accepted are 1 to 2147483647"),
        ("--count=1.5", "--count=1.5"),
        ("--count=" + "9" * 5000, "--count=999"),
        ("--wait_s=0", "--wait_s=0.0: accepted are 0.5 to 1000000"),
        ("--wait_s=nan", "--wait_s=nan: accepted are"),
        ("--wait_s=inf", "--wait_s=inf: accepted are"),
        ("--wait_s=-inf", "--wait_s=-inf: accepted are"),
        ("--kind=c", "--kind=c: known are a, b"),
        ("--kind=", "--kind=: known are a, b"),
        ("--kinds=a,x", "--kinds=x: known are a, b, c"),
        ("--loud=perhaps", "--loud=perhaps"),
        ("--absent", "Unknown command line flag 'absent'"),
        ("--name", "name"),
        ("word", "unexpected argument 'word': all arguments are --flag=value"),
        ("--flagfile=/absent", "/absent"),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_meant_is_one_line(argument, message):
    with pytest.raises(UsageError) as refusal:
        flags().parse([argument])
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_of_flags_that_is_no_text(tmp_path):
    (tmp_path / "flags").write_bytes(b"\xff\xfe--count=3")
    with pytest.raises(UsageError, match="can't decode"):
        flags().parse([f"--flagfile={tmp_path}/flags"])


def test_help_names_every_flag_and_no_module():
    with pytest.raises(HelpRequested) as shown:
        flags().parse(["--help"])
    text = str(shown.value)
    assert text.startswith("trial: measures nothing.")
    for name in ("name", "texts", "[no]loud", "count", "kinds", "[no]quick", "out", "[no]help"):
        assert f"--{name}:" in text
    assert "command_line" not in text


def test_paths_are_the_callers(tmp_path, monkeypatch):
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert flags().parse([]).path("out") is None
    assert flags().parse(["--out=x/../y"]).path("out") == tmp_path / "y"
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", "/somewhere/else")
    assert str(flags().parse(["--out=results"]).path("out")) == "/somewhere/else/results"


def test_a_home_that_nobody_has_and_a_folder_that_is_gone(monkeypatch):
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    with pytest.raises(UsageError, match=r"--out=~nobody\.of\.this\.name/x: "):
        flags().parse(["--out=~nobody.of.this.name/x"]).path("out")

    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(UsageError, match="the current folder: No such file"):
        flags().parse([])
