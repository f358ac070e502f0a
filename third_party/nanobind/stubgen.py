"""Runs nanobind's stub generator as a program."""

import sys

from nanobind import stubgen

if __name__ == "__main__":
    stubgen.main(sys.argv[1:])
