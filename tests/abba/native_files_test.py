"""Arms run only from the same native files: found, pinned, compared and refused.

Beside the package's own library the test has another build of it: the same sources,
precision revision and build id, so that the load gate takes both, but linked differently.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashverify
from flashverify.abba import native_files, probe
from flashverify.abba.native_files import NativeMismatchError, check_arms, compare
from flashverify.abba.outcome import NotRunError
from tests.abba import support

LIBRARY = "libflashverify.so.4"
OTHER_BUILD = Path(__file__).parent / "other_build" / LIBRARY

# A program that shares no line with the probe: the files that the kernel has mapped executable
# after a pass of the default route.
INDEPENDENT = """
import pathlib, re, torch, flashverify
cache = torch.zeros(1, 16, 1, 64).to(torch.float8_e4m3fn)
flashverify.paged_attention(torch.zeros(1, 1, 64).half(), cache, cache,
    torch.zeros(1, 1, dtype=torch.int32), torch.tensor([16], dtype=torch.int32))
flashverify.native_info()
maps = pathlib.Path("/proc/self/maps").read_text()
print(*sorted(set(re.findall(r"^\\S+ ..x. .* (/.+)$", maps, re.M))), sep="\\n")
"""


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def copy_of_package(folder, library=None):
    """A package root like this process's, on request with another library."""
    package = folder / "flashverify"
    shutil.copytree(Path(flashverify.__file__).parent, package)
    if library is not None:
        (package / LIBRARY).unlink()
        shutil.copy(library, package / LIBRARY)
    return folder


@pytest.fixture(scope="module")
def equal_reports():
    return check_arms({"A": (None, "grouped_half"), "B": (None, "grouped_fp32")})


def test_equal_arms_pass_and_each_ran_its_route(equal_reports):
    assert equal_reports["A"]["route"] == "grouped_half"
    assert equal_reports["B"]["route"] == "grouped_fp32"
    assert equal_reports["A"]["files"] == equal_reports["B"]["files"]
    info = flashverify.native_info()
    for report in equal_reports.values():
        for field in ("precision_revision", "build_id", "library_sha256", "extension_sha256"):
            assert report[field] == info[field]


def test_every_file_that_the_process_mapped_is_pinned_by_digest(equal_reports):
    found = subprocess.run(
        [sys.executable, "-c", INDEPENDENT],
        env=support.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    pins = {path: sha256(path) for path in found if path}
    for report in equal_reports.values():
        assert {file["path"]: file["sha256"] for file in report["files"]} == pins
        for file in report["files"]:
            assert file["size_bytes"] == Path(file["path"]).stat().st_size
    names = {Path(path).name for path in pins}
    assert {LIBRARY, "libtbb.so.12", "_native.abi3.so", "libc.so.6", "libtorch_cpu.so"} <= names
    assert any("nanobind_backend" in path for path in pins)
    # The kernel names the file that a link leads to.
    library = Path(flashverify.__file__).parent / LIBRARY
    assert pins[str(library.resolve())] == flashverify.native_info()["library_sha256"]


def test_a_copy_of_the_same_bytes_elsewhere_is_the_same(tmp_path):
    reports = check_arms(
        {"A": (copy_of_package(tmp_path), "grouped_fp32"), "B": (None, "grouped_fp32")}
    )
    assert str(tmp_path) in reports["A"]["library_path"]
    assert str(tmp_path) not in reports["B"]["library_path"]


@pytest.mark.parametrize("arm", ["A", "B"])
def test_an_arm_of_another_build_is_refused_in_a_table(tmp_path, arm):
    assert sha256(OTHER_BUILD) != flashverify.native_info()["library_sha256"]
    root = copy_of_package(tmp_path / "root", OTHER_BUILD)
    done = support.call(*support.SMALL, f"--arm_{arm.lower()}_root={root}", f"--out={tmp_path}/out")
    assert done.code == 3
    assert "the arms' native dependencies differ: libflashverify.so.4" in done.stderr
    for digest in (sha256(OTHER_BUILD), flashverify.native_info()["library_sha256"]):
        assert digest in done.stdout
    assert str(root / "flashverify" / LIBRARY) in done.stdout

    result = support.load(tmp_path / "out")
    assert result["status"] == "not run"
    assert "differ: libflashverify.so.4" in result["reason"]
    assert result["native"]["arms_identical"] is False
    assert result["arms"] is None
    (difference,) = result["native"]["differences"]
    assert difference["name"] == LIBRARY
    assert difference["sha256"][arm] == sha256(OTHER_BUILD)
    other = {"A": "B", "B": "A"}[arm]
    assert difference["sha256"][other] == flashverify.native_info()["library_sha256"]
    assert not (tmp_path / "out/abba.png").exists()
    assert sha256(OTHER_BUILD) in (tmp_path / "out/abba.md").read_text()


def test_two_equal_arms_that_are_not_what_this_process_runs_are_refused(tmp_path):
    root = copy_of_package(tmp_path / "root", OTHER_BUILD)
    done = support.call(
        *support.SMALL, f"--arm_a_root={root}", f"--arm_b_root={root}", f"--out={tmp_path}/out"
    )
    assert done.code == 3
    (difference,) = support.load(tmp_path / "out")["native"]["differences"]
    assert difference["sha256"]["this process"] == flashverify.native_info()["library_sha256"]


def test_an_arm_that_the_load_gate_refuses_cannot_run(tmp_path):
    library = tmp_path / "broken"
    library.write_bytes(b"\x7fELF nothing else")
    root = copy_of_package(tmp_path / "root", library)
    done = support.call(*support.SMALL, f"--arm_a_root={root}", f"--out={tmp_path}/out")
    assert done.code == 4
    assert "arm A could not run: " in done.stderr and "StaleNativeLibraryError" in done.stderr
    assert support.load(tmp_path / "out")["native"]["arms_identical"] is None


def test_the_package_of_this_process_never_answers_for_an_arm(tmp_path):
    (tmp_path / "flashverify").mkdir()
    with pytest.raises(NotRunError, match="arm A could not run: "):
        check_arms({"A": (tmp_path, "grouped_fp32"), "B": (None, "grouped_fp32")})


def test_the_callers_folder_and_python_variables_take_no_part(tmp_path, monkeypatch):
    for name in ("torch", "flashverify", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_arms({"A": (None, "scalar_fp32"), "B": (None, "scalar_half")})


def file(name, digest, path=None):
    return probe.NativeFile(name=name, path=path or f"/lib/{name}", sha256=digest, size_bytes=1)


def test_comparison_matches_by_name_and_tells_missing_files():
    same = [file("a.so", "1"), file("b.so", "2")]
    assert compare({"A": same, "B": list(reversed(same))}) == []
    (changed,) = compare({"A": same, "B": [file("a.so", "1"), file("b.so", "3")]})
    assert (changed.name, changed.sha256) == ("b.so", {"A": "2", "B": "3"})
    (missing,) = compare({"A": same, "B": [file("a.so", "1")]})
    assert (missing.name, missing.sha256) == ("b.so", {"A": "2", "B": None})
    assert missing.path == {"A": "/lib/b.so", "B": None}


def test_comparison_knows_several_files_of_one_name():
    pair = [file("_C.so", "1", "/x/_C.so"), file("_C.so", "2", "/y/_C.so")]
    assert compare({"A": pair, "B": list(reversed(pair))}) == []
    (difference,) = compare({"A": pair, "B": pair[:1]})
    assert difference.sha256 == {"A": "1 2", "B": "1"}


def test_this_process_must_have_the_arms_files(equal_reports):
    native_files.check_this_process(equal_reports)
    report = json.loads(json.dumps(equal_reports["A"]))
    report["files"].append(file("libelsewhere.so", "1", sys.executable))
    with pytest.raises(NativeMismatchError, match=r"libelsewhere\.so") as refusal:
        native_files.check_this_process({"A": report})
    assert refusal.value.differences[0].sha256 == {"A": "1", "this process": None}


def test_a_file_replaced_while_mapped_is_no_proof(tmp_path):
    program = (
        "import ctypes, os, sys\n"
        f"sys.path.insert(0, {str(Path(probe.__file__).parent)!r})\n"
        "import probe\n"
        "path = sys.argv[1]\n"
        "ctypes.CDLL(path)\n"
        "assert any(f['path'] == path for f in probe.mapped_native_files())\n"
        "os.rename(sys.argv[2], path)\n"
        "probe.mapped_native_files()\n"
    )
    for name in ("first.so", "second.so"):
        shutil.copy(Path(flashverify.__file__).parent / "libtbb.so.12", tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "first.so", tmp_path / "second.so"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "first.so (deleted): the file was replaced while it is mapped" in done.stderr
