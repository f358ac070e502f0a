"""The compiler driver: images, reports, and errors in words."""

import sys
import unittest

import nvrtc

_KERNEL = b'extern "C" __global__ void copy(float* to, const float* from) { to[0] = from[0]; }'


class NvrtcTest(unittest.TestCase):
    library = None

    def setUp(self):
        self.compiler = nvrtc.Nvrtc(self.library)

    def test_cubin(self):
        image, log = self.compiler.compile(_KERNEL, "copy.cu", "sm_70", ["--ptxas-options=-v"])
        self.assertEqual(image[:4], b"\x7fELF")
        rows, other = nvrtc.resources(log)
        self.assertEqual([row[0] for row in rows], ["copy"])
        self.assertEqual(rows[0][2:5], ("0", "0", "0"))
        self.assertEqual(other, [])

    def test_cubin_is_reproducible(self):
        images = {self.compiler.compile(_KERNEL, "copy.cu", "sm_90a", [])[0] for _ in range(2)}
        self.assertEqual(len(images), 1)

    def test_ptx_ends_with_null(self):
        image, _ = self.compiler.compile(_KERNEL, "copy.cu", "compute_70", [])
        self.assertIn(b".target sm_70", image)
        self.assertEqual(image[-1:], b"\0")

    def test_error_names_the_file(self):
        with self.assertRaisesRegex(nvrtc.CompileError, r"bad\.cu\(1\): error"):
            self.compiler.compile(b"__global__ void f() { undefined(); }", "bad.cu", "sm_70", [])

    def test_unknown_architecture(self):
        with self.assertRaisesRegex(nvrtc.CompileError, "gpu-architecture"):
            self.compiler.compile(_KERNEL, "copy.cu", "sm_1", [])

    def test_report_of_spills_and_shared_memory(self):
        log = "\n".join(
            [
                "ptxas info    : Compiling entry function 'f' for 'sm_90a'",
                "ptxas         .     24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads",
                "ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem",
                "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized",
            ]
        )
        rows, other = nvrtc.resources(log)
        self.assertEqual(rows, [("f", "168", "24", "8", "4", "1024")])
        self.assertEqual(len(other), 1)


if __name__ == "__main__":
    NvrtcTest.library = next(p for p in sys.argv[1:] if "libnvrtc.so" in p)
    unittest.main(argv=sys.argv[:1])
