"""The compiler driver: images, reports, and errors in words."""

import os
from pathlib import Path

import pytest

from third_party.cuda import nvrtc

_KERNEL = b'extern "C" __global__ void copy(float* to, const float* from) { to[0] = from[0]; }'


@pytest.fixture(name="compiler")
def fixture_compiler():
    (library,) = Path(os.environ["TEST_SRCDIR"]).glob("*/wheel/nvidia/*/lib/libnvrtc.so.12")
    return nvrtc.Nvrtc(str(library))


def test_cubin(compiler):
    image, log = compiler.compile(_KERNEL, "copy.cu", "sm_70", ["--ptxas-options=-v"])
    assert image[:4] == b"\x7fELF"
    rows, other = nvrtc.resources(log)
    assert [row[0] for row in rows] == ["copy"]
    assert rows[0][2:5] == ("0", "0", "0")
    assert other == []


def test_cubin_is_reproducible(compiler):
    images = {compiler.compile(_KERNEL, "copy.cu", "sm_90a", [])[0] for _ in range(2)}
    assert len(images) == 1


def test_ptx_ends_with_null(compiler):
    image, _ = compiler.compile(_KERNEL, "copy.cu", "compute_70", [])
    assert b".target sm_70" in image
    assert image[-1:] == b"\x00"


def test_error_names_the_file(compiler):
    with pytest.raises(nvrtc.CompileError, match=r"bad\.cu\(1\): error"):
        compiler.compile(b"__global__ void f() { undefined(); }", "bad.cu", "sm_70", [])


def test_unknown_architecture(compiler):
    with pytest.raises(nvrtc.CompileError, match="gpu-architecture"):
        compiler.compile(_KERNEL, "copy.cu", "sm_1", [])


def test_report_of_spills_and_shared_memory():
    log = "\n".join(
        [
            "ptxas info    : Compiling entry function 'f' for 'sm_90a'",
            "ptxas         .     24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads",
            "ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem",
            "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized",
        ]
    )
    rows, other = nvrtc.resources(log)
    assert rows == [("f", "168", "24", "8", "4", "1024")]
    assert len(other) == 1
