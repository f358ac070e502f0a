"""What the wheel says about itself, against what is in it."""

import base64
import configparser
import csv
import hashlib
import io
import os
import re
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import abi3info
import pytest
from abi3info.models import Symbol

from tools.wheel import elf

WHEEL = Path(os.environ["WHEEL"])
NAME = re.compile(
    r"flashverify-(?P<version>[0-9.]+)-cp310-abi3-"
    r"manylinux_(?P<glibc>2_(?P<minor>[0-9]+))_x86_64\.whl"
)

# PEP 600: a manylinux_2_X system has glibc 2.X and the C++ run time of its time.
# What GCC 11.2 (glibc 2.34 and 2.35 came out beside it) brought:
NEWEST_VERSIONS = {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2"}
SYSTEM_LIBRARIES |= {"libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module")
def archive():
    with zipfile.ZipFile(WHEEL) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_objects(archive, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    archive.extractall(folder)
    found = {
        path.name: elf.read(path)
        for path in folder.rglob("*")
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"
    }
    assert set(found) == {"_native.abi3.so", "libflashverify.so.4", "libtbb.so.12"}
    return found


@pytest.fixture(scope="module")
def tag():
    matched = NAME.fullmatch(WHEEL.name)
    assert matched, WHEEL.name
    return matched


def dist_info(archive, name):
    (member,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
    return archive.read(member).decode()


def test_metadata_agrees_with_the_file_name_and_the_package(archive, tag):
    metadata = HeaderParser().parsestr(dist_info(archive, "METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("flashverify", tag["version"])
    source = archive.read("flashverify/__init__.py").decode()
    assert f'\n__version__ = "{tag["version"]}"\n' in source
    assert metadata["Requires-Python"] == ">=3.10"
    needed = {re.split(r"[><= ]", line)[0] for line in metadata.get_all("Requires-Dist")}
    assert {"nanobind-backend", "numpy", "torch"} <= needed
    wheel = HeaderParser().parsestr(dist_info(archive, "WHEEL"))
    assert wheel["Tag"] == f"cp310-abi3-manylinux_{tag['glibc']}_x86_64"
    assert wheel["Root-Is-Purelib"] == "false"


def test_record_lists_every_file_with_its_hash(archive):
    rows = list(csv.reader(io.StringIO(dist_info(archive, "RECORD"))))
    assert [row[0] for row in rows] == archive.namelist()
    for name, digest, size in rows[:-1]:
        content = archive.read(name)
        encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
        assert (digest, size) == (f"sha256={encoded.decode()}", str(len(content)))
    assert rows[-1][0].endswith("/RECORD")
    assert rows[-1][1:] == ["", ""]


def test_members_carry_no_trace_of_the_machine(archive):
    for entry in archive.infolist():
        assert entry.date_time == (1980, 1, 1, 0, 0, 0), entry.filename
        assert entry.external_attr >> 16 in (0o100644, 0o100755), entry.filename
        content = archive.read(entry)
        for trace in (b"/execroot/", b"bazel-out/", b"/.cache/"):
            assert trace not in content, entry.filename


def test_the_package_is_whole(archive):
    names = set(archive.namelist())
    for name in (
        "__init__.py",
        "__main__.py",
        "_native.pyi",
        "abba/__main__.py",
        "cmake/flashverifyConfig.cmake",
        "cmake/flashverifyConfigVersion.cmake",
        "include/flashverify/flashverify.h",
        "integrations/vllm/backend.py",
        "py.typed",
    ):
        assert f"flashverify/{name}" in names
    assert all(
        name.startswith(("flashverify/", "flashverify-")) or name == "flashverify_vllm_plugin.py"
        for name in names
    )
    assert not [name for name in names if "test" in name], "tests stay at home"


def test_vllm_finds_its_plugin(archive):
    points = configparser.ConfigParser()
    points.read_string(dist_info(archive, "entry_points.txt"))
    module, _, function = points["vllm.general_plugins"]["flashverify"].partition(":")
    source = archive.read(f"{module}.py").decode()
    assert f"\ndef {function}() -> None:\n" in source
    # vLLM goes on without a plugin whose module fails to import.
    assert re.findall(r"^(?:from|import) .*", source, re.MULTILINE) == []


def test_licenses_come_with_what_they_cover(archive):
    metadata = HeaderParser().parsestr(dist_info(archive, "METADATA"))
    texts = {
        name: dist_info(archive, f"licenses/{name}") for name in metadata.get_all("License-File")
    }
    assert "Apache License" in texts["LICENSE"]
    assert "Intel Simplified Software License" in texts["tbb/LICENSE.txt"]


def test_symbol_versions_keep_the_promise_of_the_tag(shared_objects, tag):
    newest = {"GLIBC": (2, int(tag["minor"])), **NEWEST_VERSIONS}
    seen = set()
    for name, shared_object in shared_objects.items():
        for family, versions in shared_object.needed_versions.items():
            if family == "FLASHVERIFY":
                continue
            assert max(versions) <= newest[family], (name, family)
            seen.add(family)
    assert {"GLIBC", "GLIBCXX"} <= seen


def test_libraries_come_from_the_system_or_from_the_wheel(shared_objects):
    for name, shared_object in shared_objects.items():
        assert shared_object.machine == "Advanced Micro Devices X86-64", name
        assert set(shared_object.needed) <= SYSTEM_LIBRARIES | set(shared_objects), name
    assert shared_objects["_native.abi3.so"].runpath == "$ORIGIN"
    assert shared_objects["libflashverify.so.4"].runpath == "$ORIGIN"
    assert "libtbb.so.12" in shared_objects["libflashverify.so.4"].needed
    assert "libflashverify.so.4" in shared_objects["_native.abi3.so"].needed


def test_the_library_exports_one_versioned_symbol(shared_objects):
    library = shared_objects["libflashverify.so.4"]
    assert library.soname == "libflashverify.so.4"
    assert library.exported == {"fv_get_api@@FLASHVERIFY_4", "FLASHVERIFY_4"}
    extension = shared_objects["_native.abi3.so"]
    assert extension.needed_versions["FLASHVERIFY"] == [(4,)]
    assert "PyInit__native" in extension.exported


def test_the_extension_uses_the_stable_abi_of_python_3_10_alone(shared_objects):
    used = {
        name
        for name in shared_objects["_native.abi3.so"].imported
        if name.startswith("_Py") or name.startswith("Py")
    }
    assert used, "an extension that uses nothing of Python"
    stable = {**abi3info.FUNCTIONS, **abi3info.DATAS}
    for name in sorted(used):
        entry = stable.get(Symbol(name))
        assert entry is not None, f"{name} is not in the stable ABI"
        assert entry.added <= type(entry.added)(3, 10), f"{name} came with {entry.added}"
