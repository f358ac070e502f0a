"""py_test targets whose test runner is pytest."""

_RUNNER = "//tools:pytest_main.py"

def pytest_test(name, srcs, deps = [], args = [], **kwargs):
    """Runs pytest over test files, as one Bazel test.

    No test collected is a failure. `--test_filter=EXPR` becomes pytest's `-k`,
    `--test_arg` passes any other option.

    Args:
      name: the target's name.
      srcs: test files; a conftest.py among them is loaded, not collected.
      deps: py_library targets; pytest itself is added.
      args: further options for pytest.
      **kwargs: what py_test takes (data, size, tags, ...).
    """
    native.py_test(
        name = name,
        srcs = srcs + [_RUNNER],
        args = [
            "$(rootpath %s)" % src
            for src in srcs
            if not src.endswith("conftest.py")
        ] + args,
        main = _RUNNER,
        deps = deps + ["@pypi//:pytest"],
        **kwargs
    )
