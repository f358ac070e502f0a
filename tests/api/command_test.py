"""python -m flashverify and native_info(): what is installed, and where."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashverify as fv

KEYS = [
    "version",
    "precision_revision",
    "abi_version",
    "build_id",
    "library_path",
    "library_sha256",
    "extension_path",
    "extension_sha256",
    "cpu_isa",
    "cuda_images",
    "cuda_devices",
]
PACKAGE = Path(fv.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashverify", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_native_info() -> None:
    found = fv.native_info()
    assert list(found) == KEYS[1:-1]
    assert found["precision_revision"] == fv.PRECISION_REVISION == 4
    assert found["abi_version"] == fv.ABI_VERSION
    assert len(found["build_id"]) == 16 and int(found["build_id"], 16)
    assert Path(found["library_path"]) == PACKAGE / "libflashverify.so.4"
    assert found["library_sha256"] == sha256(found["library_path"])
    assert found["extension_sha256"] == sha256(found["extension_path"])
    assert found["cpu_isa"] in fv.available_cpu_isas()


def test_json() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    devices = found.pop("cuda_devices")
    assert found == {"version": fv.__version__, **fv.native_info()}
    # As many as there are, or in words why there are none.
    if isinstance(devices, str):
        assert "CUDA" in devices
    else:
        assert all(set(device) == {"index", "name", "capability", "image"} for device in devices)


def test_for_people() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [key.replace("_", " ") for key in KEYS]
    assert fv.native_info()["library_sha256"] in done.stdout


def test_the_library() -> None:
    done = run("--library")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{PACKAGE / 'libflashverify.so.4'}\n"


@pytest.mark.parametrize(
    ("option", "folder", "file"),
    [
        ("--include-dir", "include", "flashverify/flashverify.h"),
        ("--cmake-dir", "cmake", "flashverifyConfig.cmake"),
    ],
)
def test_what_only_the_wheel_ships(option: str, folder: str, file: str) -> None:
    done = run(option)
    if (PACKAGE / folder / file).exists():
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{PACKAGE / folder}\n"
    else:
        assert done.returncode == 1
        assert done.stdout == ""
        assert f"{PACKAGE / folder}: has no" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--jsn",), ("--json", "--library"), ("extra",), ("--include_dir",)]
)
def test_wrong_options(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage: python -m flashverify" in done.stderr


def test_the_version_is_the_distributions() -> None:
    assert fv.__version__.split(".")[0] == str(fv.PRECISION_REVISION)
    try:
        installed = importlib.metadata.version("flashverify")
    except importlib.metadata.PackageNotFoundError:
        return  # a source tree; the wheel's own test run looks at the metadata
    assert fv.__version__ == installed


def test_every_public_name_is_there_and_documented() -> None:
    for name in fv.__all__:
        assert getattr(fv, name) is not None
        if callable(getattr(fv, name)):
            assert getattr(fv, name).__doc__
