"""Shows that a library compiled for one instruction set shares no code by name.

Usage: isa_symbols_test.py --symbol=NAME ... ISA='ARCHIVE ...' ...

Every archive must define exactly the symbols named (demangled; {isa} and {Isa}
stand for the instruction set). Any further symbol that is not local, an inline
function's above all, is one that the linker may take for another file's, and so
run AVX-512 code where the CPU has none.
"""

import argparse
import subprocess
import sys


def defined_symbols(archive: str) -> list[str]:
    """The demangled names of the symbols that are defined and not local."""
    command = ["nm", "--defined-only", "--extern-only", "--demangle", "--format=posix", archive]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # "name type value size"; a demangled name may hold spaces. Other lines are
    # the headings "archive[member]:".
    lines = [line for line in output.splitlines() if line and not line.endswith("]:")]
    return [line.rsplit(" ", 3)[0] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--symbol", action="append", required=True)
    parser.add_argument("libraries", nargs="+")
    args = parser.parse_args()

    failures = 0
    for library in args.libraries:
        isa, _, archives = library.partition("=")
        wanted = {symbol.format(isa=isa, Isa=isa.capitalize()) for symbol in args.symbol}
        for archive in archives.split():
            found = set(defined_symbols(archive))
            failures += found != wanted
            for name in sorted(found - wanted):
                print(f"{archive}: {name} has external linkage")
            for name in sorted(wanted - found):
                print(f"{archive}: {name} is missing")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
