import os
import stat

import pytest

from flashverify.abba.outcome import UsageError, WriteError
from flashverify.abba.output import OutputFolder

FILES = {"abba.json": b"{}", "abba.md": b"#", "abba.png": b"png"}


def folder_of(wanted, caller_folder):
    return OutputFolder(wanted, caller_folder, program="abba")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_under_the_callers_by_default(tmp_path):
    first = folder_of(None, tmp_path)
    second = folder_of(None, tmp_path)
    assert first.path.parent == second.path.parent == tmp_path / "flashverify-results"
    assert first.path != second.path
    assert first.path.name.startswith("abba-")


def test_files_are_written_and_nothing_else_stays(tmp_path):
    folder = folder_of(tmp_path / "a/b", tmp_path)
    folder.write(FILES)
    assert names(tmp_path / "a/b") == sorted(FILES)
    assert (tmp_path / "a/b/abba.md").read_bytes() == b"#"


def test_own_files_of_an_earlier_run_are_replaced_and_others_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    folder_of(tmp_path, tmp_path).write(FILES)
    # A result without a plot must not stand beside the plot of another.
    folder_of(tmp_path, tmp_path).write({"abba.json": b"new", "abba.md": b"new"})
    assert names(tmp_path) == ["abba.json", "abba.md", "notes.txt"]
    assert (tmp_path / "abba.json").read_bytes() == b"new"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_abandoning_removes_what_was_made_and_nothing_else(tmp_path):
    folder = folder_of(tmp_path / "a/b/c", tmp_path)
    assert folder.path.is_dir()
    folder.abandon()
    assert names(tmp_path) == []
    (tmp_path / "kept").mkdir()
    folder_of(tmp_path / "kept", tmp_path).abandon()
    assert names(tmp_path) == ["kept"]


def test_abandoning_keeps_a_folder_that_somebody_else_uses(tmp_path):
    folder = folder_of(tmp_path / "a/b", tmp_path)
    (tmp_path / "a/other").write_text("")
    folder.abandon()
    assert names(tmp_path / "a") == ["other"]


def test_a_write_that_fails_leaves_the_earlier_result(tmp_path):
    folder = folder_of(tmp_path, tmp_path)
    folder.write(FILES)

    class Full(dict):
        def __getitem__(self, name):
            if name == "abba.png":
                raise OSError(28, "No space left on device")
            return b"half"

    with pytest.raises(WriteError, match=r"cannot write to .*: No space left"):
        folder.write(Full(FILES))
    assert names(tmp_path) == sorted(FILES)
    assert (tmp_path / "abba.json").read_bytes() == b"{}"


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for wanted in ("file", "file/below"):
        with pytest.raises(UsageError, match=r"--out: cannot write to .*/file"):
            folder_of(tmp_path / wanted, tmp_path)


def test_a_name_too_long_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(UsageError, match="File name too long"):
        folder_of(tmp_path / "made" / ("x" * 300), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    for wanted in (tmp_path, tmp_path / "below"):
        with pytest.raises(UsageError, match="Permission denied"):
            folder_of(wanted, tmp_path)


def test_a_folder_that_the_system_keeps_is_refused(tmp_path):
    # Not even root makes a folder there.
    with pytest.raises(UsageError, match=r"--out: cannot write to /proc/results"):
        folder_of(type(tmp_path)("/proc/results"), tmp_path)


def test_a_folder_in_the_place_of_a_file_is_found_before_anything_is_measured(tmp_path):
    (tmp_path / "abba.md").mkdir()
    with pytest.raises(UsageError, match=r"abba\.md is a folder, and not a file"):
        folder_of(tmp_path, tmp_path)
    assert names(tmp_path) == ["abba.md"]


def test_a_failed_block_abandons_and_a_done_one_does_not(tmp_path):
    with pytest.raises(KeyboardInterrupt), folder_of(tmp_path / "a/b", tmp_path):
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with folder_of(tmp_path / "a/b", tmp_path):
        pass
    assert names(tmp_path / "a") == ["b"]
