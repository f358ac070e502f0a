"""Writes the assembly that embeds device code: a table of sources, architectures and images.

The digest of each image stands in the text. Without it the text would be the same for other
images, and Bazel, which forgets the inputs of a compiler that its list of headers does not
name, would go on with the object of the images before.
"""

import argparse
import hashlib
from pathlib import Path


def table(symbol, images):
    """The assembly for (source, architecture, path of the image) triples."""
    lines = [".section .rodata"]
    for i, (source, arch, path) in enumerate(images):
        lines += [
            f'.Lsource{i}: .asciz "{source}"',
            f'.Larch{i}: .asciz "{arch}"',
            ".balign 64",
            f"// sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}",
            f'.Lbegin{i}: .incbin "{path}"',
            f".Lend{i}:",
        ]
    lines += [
        '.section .data.rel.ro,"aw"',
        ".balign 8",
        f".globl {symbol}",
        f".hidden {symbol}",
        f".type {symbol}, @object",
        f"{symbol}:",
    ]
    lines += [f".quad .Lsource{i}, .Larch{i}, .Lbegin{i}, .Lend{i}" for i in range(len(images))]
    lines += [
        ".quad 0, 0, 0, 0",
        f".size {symbol}, .-{symbol}",
        '.section .note.GNU-stack,"",@progbits',
    ]
    return "\n".join(lines) + "\n"


def main():
    """Writes the table of the images that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--symbol", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--image", nargs=3, action="append", default=[], metavar=("SOURCE", "ARCH", "PATH")
    )
    options = parser.parse_args()
    options.out.write_text(table(options.symbol, options.image), encoding="utf-8")


if __name__ == "__main__":
    main()
