"""Prints what bounds the grouped kernels on a V100, and the time predicted there.

No V100 measured anything here: every time is a prediction of tools/roofline/model.py
from counts of the machine code for sm_70.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.roofline.model import CASES, V100, choose, predict
from tools.roofline.sass import CubinError, Kernel, kernels


def table(found: Sequence[Kernel], route: str) -> str:
    """A Markdown table of every case: bounds and predicted time, microseconds."""
    by_name = {kernel.name: kernel for kernel in found}
    lines = [
        "| case | kernel | DRAM | HMMA | shared memory | issue | predicted | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        name = choose(case, list(by_name), route)
        p = predict(case, by_name[name])
        times = (p.dram_us, p.hmma_us, p.shared_us, p.issue_us, p.predicted_us)
        cells = [case.label, name, *(f"{time:.0f}" for time in times), p.limit]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Reads the cubins that the arguments name. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--route", choices=("fp32", "half"), default="fp32")
    parser.add_argument("cubins", nargs="+", type=Path, help="images of grouped_sm70 for sm_70")
    args = parser.parse_args(argv)
    try:
        found = [kernel for path in args.cubins for kernel in kernels(path)]
        text = table(found, args.route)
    except (CubinError, OSError, ValueError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    print(
        f"PREDICTED for {V100.name} ({V100.multiprocessors} SMs, {V100.clock_ghz} GHz, "
        f"{V100.memory_gb_per_s:.0f} GB/s), never measured; microseconds"
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
