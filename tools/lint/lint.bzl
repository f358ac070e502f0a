"""Linters over the whole source tree, as tests."""

def lint_test(name, linter, program):
    """Runs a linter over every file of its kind that the source tree has.

    Args:
      name: the target's name.
      linter: what lint_test.py calls it.
      program: the linter's executable; a py_binary too.
    """
    native.py_test(
        name = name,
        size = "small",
        srcs = ["lint_test.py"],
        args = [
            linter,
            "$(rootpath %s)" % program,
        ],
        data = [program],
        main = "lint_test.py",
        # What it reads is not among its inputs (source_tree.py).
        tags = [
            "external",
            "lint",
            "no-remote",
        ],
        deps = [":source_tree"],
    )
