"""The wheel as its user meets it: pip, the module, CMake."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import pytest

from tools.wheel.environment import Environment

WHEEL = Path(os.environ["WHEEL"]).absolute()
NINJA = Path(os.environ["NINJA"]).absolute()
PROJECT = Path(__file__).parent / "cmake"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("user") / "environment", WHEEL)


@pytest.fixture(scope="module")
def cmake_dir(installed):
    return installed.run("-m", "flashverify", "--cmake-dir").strip()


def test_the_module_describes_the_installed_files(installed):
    info = json.loads(installed.run("-m", "flashverify", "--json"))
    library = Path(info["library_path"])
    assert library.is_relative_to(installed.folder)
    assert library == Path(installed.run("-m", "flashverify", "--library").strip())
    assert info["precision_revision"] == 4


def test_the_header_lies_where_the_module_says(installed):
    folder = Path(installed.run("-m", "flashverify", "--include-dir").strip())
    assert folder.is_relative_to(installed.folder)
    assert (folder / "flashverify/flashverify.h").is_file()


def test_abba_is_there(installed):
    command = [installed.python, "-m", "flashverify.abba", "--no_such_flag"]
    done = subprocess.run(command, capture_output=True, text=True, env=installed.variables())
    assert done.returncode == 2
    assert "no_such_flag" in done.stderr


def test_pip_finds_nothing_missing_or_changed(installed):
    pip = [sys.executable, "-m", "pip", "--python", installed.python]
    shown = subprocess.run([*pip, "show", "--files", "flashverify"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    files = shown.stdout.partition("Files:\n")[2].split()
    assert files
    assert all((installed.site_packages / name).is_file() for name in files)


def run_cmake(folder, *arguments):
    command = [Path(cmake.CMAKE_BIN_DIR) / "cmake", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    # In one line: CMake wraps its messages.
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def configure(folder, cmake_dir, project=PROJECT):
    options = ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={NINJA}", f"-Dflashverify_DIR={cmake_dir}"]
    return run_cmake(folder, "-S", project, "-B", "build", *options)


def test_a_c_and_a_cpp_program_build_and_run(tmp_path, cmake_dir):
    status, output = configure(tmp_path, cmake_dir)
    assert status == 0, output
    status, output = run_cmake(tmp_path, "--build", "build")
    assert status == 0, output
    for program, line in {
        "attend": "grouped_fp32 at precision revision 4\n",
        "merge": "merged: 2 4\n",
    }.items():
        command = [tmp_path / "build" / program]
        done = subprocess.run(command, capture_output=True, text=True, env={})
        assert (done.returncode, done.stdout) == (0, line), done.stderr


@pytest.mark.parametrize("version", ["3", "5", "4.99"])
def test_another_version_is_not_found(tmp_path, cmake_dir, version):
    text = (PROJECT / "CMakeLists.txt").read_text()
    assert "find_package(flashverify 4 " in text
    (tmp_path / "CMakeLists.txt").write_text(text.replace("verify 4 ", f"verify {version} "))
    status, output = configure(tmp_path, cmake_dir, project=tmp_path)
    assert status != 0
    assert "compatible with requested version" in output


def test_an_installation_that_lacks_a_file_is_not_found(tmp_path, cmake_dir):
    package = tmp_path / "flashverify"
    shutil.copytree(Path(cmake_dir).parent, package)
    (package / "libtbb.so.12").unlink()
    status, output = configure(tmp_path, package / "cmake")
    assert status != 0
    assert "libtbb.so.12 is missing" in output
