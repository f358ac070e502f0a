"""Compiles one CUDA source for one architecture through NVRTC's C API.

Writes the image (a cubin for sm_NN, PTX for compute_NN) and what ptxas says of
each kernel's resources, as lines "kernel <TAB> registers <TAB> stack bytes <TAB>
spill store bytes <TAB> spill load bytes <TAB> static shared bytes".
"""

import argparse
import ctypes
import re
import sys
from pathlib import Path

# NVRTC has no option for silencing these two: a notice about old targets, and
# ptxas speaking of fences that it adds before wgmma.
_QUIET = re.compile(r"Architectures prior to|\(C7519\)")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """NVRTC refused the source; the text is its log."""


class Nvrtc:
    """The library at `path`."""

    def __init__(self, path):
        self._library = ctypes.CDLL(str(Path(path).absolute()))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source, name, arch, options):
        """Returns (image bytes, log text) of `source` compiled for `arch`."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source, name.encode(), 0, None, None
            )
        )
        try:
            flags = ["--gpu-architecture=" + arch, *options]
            array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
            result = self._library.nvrtcCompileProgram(program, len(flags), array)
            log = self._fetch("ProgramLog", program).rstrip(b"\0").decode()
            if result:
                raise CompileError(log)
            if arch.startswith("compute_"):
                return self._fetch("PTX", program), log  # the null that ends it included
            return self._fetch("CUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what, program):
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, "nvrtcGet" + what)(program, data))
        return data.raw

    def _check(self, code):
        if code:
            raise CompileError(self._library.nvrtcGetErrorString(code).decode())


def _is_news(line):
    routine = "ptxas" in line and not re.search("Potential Performance Loss|warning", line)
    return bool(line.strip()) and not routine and not _QUIET.search(line)


def resources(log):
    """Returns (rows of the report, other lines) of a verbose ptxas log."""
    rows, other = [], []
    kernel, stack = None, None
    for line in log.splitlines():
        entry, frame, used = _ENTRY.search(line), _STACK.search(line), _USED.search(line)
        if entry:
            kernel = entry.group(1)
        elif frame:
            stack = frame.groups()
        elif used and kernel:
            shared = _SHARED.search(line)
            rows.append((kernel, used.group(1), *stack, shared.group(1) if shared else "0"))
            kernel, stack = None, None
        elif _is_news(line):
            other.append(line)
    return sorted(rows), other


def main(argv):
    """Compiles what the arguments name. Returns the exit status."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvrtc", required=True, help="libnvrtc.so.12")
    parser.add_argument("--arch", required=True, help="sm_NN or compute_NN")
    parser.add_argument("--image", required=True, help="file to write")
    parser.add_argument("--report", required=True, help="file to write")
    parser.add_argument("source")
    args = parser.parse_args(argv[:split])
    text = Path(args.source).read_bytes()
    options = [*argv[split + 1 :], "--ptxas-options=-v"]
    try:
        image, log = Nvrtc(args.nvrtc).compile(text, args.source, args.arch, options)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    rows, other = resources(log)
    if other:
        print("\n".join(other), file=sys.stderr)
    Path(args.image).write_bytes(image)
    Path(args.report).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    # ptxas names serialised wgmma in a note; here it is a defect.
    return 1 if any("Potential Performance Loss" in line for line in other) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
