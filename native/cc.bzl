"""C++ targets with this project's flags."""

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wconversion",
]

# -ffp-contract=off: GCC would otherwise fuse a * b + c where its optimiser likes,
# and the same row would get other bits in another caller. Code that wants a fused
# operation says so.
CXX_COPTS = WARNINGS + [
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-ffp-contract=off",
]

C_COPTS = WARNINGS + [
    "-std=c99",
    "-pedantic",
]

# Instruction sets that one source is compiled for: {name: compiler flags}. The
# first-named features of each line are what fv_cpu_isa promises.
ISA_COPTS = {
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
    ],
    "avx2": [
        "-mavx2",
        "-mfma",
        "-mf16c",
    ],
    "portable": [],
}

def _copts(srcs):
    return C_COPTS if [src for src in srcs if src.endswith(".c")] else CXX_COPTS

def fv_cc_library(name, srcs = [], copts = [], **kwargs):
    """A cc_library with warnings as errors and hidden symbols.

    Args:
      name: the target's name.
      srcs: sources, of C++17 or (all of them) of C99.
      copts: further compiler flags.
      **kwargs: what cc_library takes.
    """
    native.cc_library(
        name = name,
        srcs = srcs,
        copts = _copts(srcs) + copts,
        linkstatic = True,
        **kwargs
    )

def fv_cc_binary(name, srcs, copts = [], deps = [], **kwargs):
    """A program that runs from the build tree, oneTBB included.

    Args:
      name: the target's name.
      srcs: sources, of C++17 or (all of them) of C99.
      copts: further compiler flags.
      deps: libraries.
      **kwargs: what cc_binary takes.
    """
    native.cc_binary(
        name = name,
        srcs = srcs,
        copts = _copts(srcs) + copts,
        deps = deps + ["//third_party/tbb"],
        **kwargs
    )

def fv_cc_test(name, srcs, copts = [], deps = [], size = "small", **kwargs):
    """A test program: it passes by exiting 0.

    Args:
      name: the target's name.
      srcs: sources, of C++17 or (all of them) of C99.
      copts: further compiler flags.
      deps: libraries; oneTBB is added.
      size: the test's size.
      **kwargs: what cc_test takes.
    """
    native.cc_test(
        name = name,
        size = size,
        srcs = srcs,
        copts = _copts(srcs) + copts,
        deps = deps + ["//third_party/tbb"],
        **kwargs
    )

def isa_library(name, srcs, symbols, hdrs = [], copts = [], deps = [], visibility = None, **kwargs):
    """Compiles the same sources once per instruction set of ISA_COPTS.

    Each copy sees -DFV_CPU_ISA=<isa>, which its code uses as the name of its
    namespace. The test <name>_symbols_test shows that a copy defines `symbols`
    and nothing else that the linker could take for another file's: an inline
    function that two files share would otherwise be linked once, and maybe in its
    AVX-512 form.

    Args:
      name: a library of all copies; <name>_<isa> is one.
      srcs: C++17 sources.
      symbols: demangled names that each copy defines; {isa} stands for its name,
        {Isa} for the capitalised name.
      hdrs: headers.
      copts: further compiler flags.
      deps: libraries.
      visibility: of all targets.
      **kwargs: what cc_library takes.
    """
    for isa, isa_copts in ISA_COPTS.items():
        fv_cc_library(
            name = "%s_%s" % (name, isa),
            srcs = srcs,
            hdrs = hdrs,
            copts = isa_copts + copts,
            local_defines = ["FV_CPU_ISA=" + isa],
            visibility = visibility,
            deps = deps,
            **kwargs
        )
    native.cc_library(
        name = name,
        hdrs = hdrs,
        visibility = visibility,
        deps = [":%s_%s" % (name, isa) for isa in ISA_COPTS],
    )

    # py_test takes files from a filegroup, not from a cc_library.
    for isa in ISA_COPTS:
        native.filegroup(
            name = "%s_%s_archive" % (name, isa),
            srcs = [":%s_%s" % (name, isa)],
            visibility = ["//visibility:private"],
        )
    native.py_test(
        name = name + "_symbols_test",
        size = "small",
        srcs = ["//native:isa_symbols_test.py"],
        args = [
            "--symbol=" + symbol
            for symbol in symbols
        ] + [
            "%s=$(rootpaths :%s_%s_archive)" % (isa, name, isa)
            for isa in ISA_COPTS
        ],
        data = [":%s_%s_archive" % (name, isa) for isa in ISA_COPTS],
        main = "//native:isa_symbols_test.py",
    )
