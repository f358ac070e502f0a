"""Tests of code that is compiled once per instruction set."""

load("//native:cc.bzl", "ISA_COPTS", "fv_cc_binary", "fv_cc_test")

def isa_test(name, srcs, copts = [], deps = [], **kwargs):
    """One test per instruction set of ISA_COPTS; it is skipped where the CPU lacks it.

    Each copy sees -DFV_CPU_ISA=<isa>, as in isa_library.

    Args:
      name: a suite of all copies; <name>_<isa> is one.
      srcs: C++17 sources of a program that passes by exiting 0.
      copts: further compiler flags.
      deps: libraries.
      **kwargs: what fv_cc_test takes.
    """
    for isa, isa_copts in ISA_COPTS.items():
        program = "%s_%s_program" % (name, isa)
        fv_cc_binary(
            name = program,
            testonly = True,
            srcs = srcs,
            copts = isa_copts + copts,
            local_defines = ["FV_CPU_ISA=" + isa],
            deps = deps,
        )
        fv_cc_test(
            name = "%s_%s" % (name, isa),
            srcs = ["//native/cpu:isa_test_launcher.cc"],
            args = [isa, "$(rootpath :%s)" % program],
            data = [":" + program],
            deps = ["//native/cpu"],
            **kwargs
        )
    native.test_suite(
        name = name,
        tests = [":%s_%s" % (name, isa) for isa in ISA_COPTS],
    )
