"""Packs a wheel whose bytes depend on nothing but its contents."""

import argparse
import base64
import hashlib
import sys
import zipfile
from pathlib import Path

_EARLIEST_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can hold


def record_line(name: str, content: bytes) -> str:
    """A file's line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def wheel_text(tag: str) -> str:
    """The text of WHEEL; a compressed tag set is spelt out."""
    pythons, abis, platforms = (part.split(".") for part in tag.split("-"))
    lines = ["Wheel-Version: 1.0", "Generator: flashverify", "Root-Is-Purelib: false"]
    lines += [f"Tag: {p}-{a}-{t}" for p in pythons for a in abis for t in platforms]
    return "".join(line + "\n" for line in lines)


def metadata_text(args: argparse.Namespace, licenses: list[str]) -> str:
    """The text of METADATA."""
    lines = ["Metadata-Version: 2.4", f"Name: {args.distribution}", f"Version: {args.version}"]
    given = args.metadata.read_text(encoding="utf-8").splitlines()
    lines += [line for line in given if line and not line.startswith("#")]
    lines += [f"License-File: {name}" for name in licenses]
    text = "".join(line + "\n" for line in lines)
    if args.description:
        text += "Description-Content-Type: text/markdown\n\n"
        text += args.description.read_text(encoding="utf-8")
    return text


def named_files(items: list[str]) -> dict[str, bytes]:
    """Reads ["NAME=PATH", ...]; two files of one name are an error."""
    files: dict[str, bytes] = {}
    for item in items:
        name, _, path = item.partition("=")
        if name in files:
            raise SystemExit(f"two files for {name}")
        files[name] = Path(path).read_bytes()
    return files


def file_mode(name: str) -> int:
    """Shared objects are executable, as linkers make them."""
    return 0o755 if name.endswith(".so") or ".so." in name else 0o644


def main(argv: list[str]) -> None:
    """Writes the wheel that the arguments describe."""
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--distribution", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--tag", required=True)
    parser.add_argument("--metadata", required=True, type=Path)
    parser.add_argument("--description", type=Path)
    parser.add_argument("--entry_points", type=Path)
    parser.add_argument("--license", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH")
    args = parser.parse_args(argv)

    info = f"{args.distribution.replace('-', '_')}-{args.version}.dist-info"
    files = named_files(args.file)
    licenses = named_files(args.license)
    dist_info = {f"licenses/{name}": text for name, text in licenses.items()}
    dist_info["METADATA"] = metadata_text(args, sorted(licenses)).encode()
    if args.entry_points:
        dist_info["entry_points.txt"] = args.entry_points.read_bytes()
    dist_info["WHEEL"] = wheel_text(args.tag).encode()

    # dist-info comes last, and RECORD at its end, so that a reader that streams
    # has the files before what is said about them.
    members = dict(sorted(files.items()))
    members |= {f"{info}/{name}": content for name, content in sorted(dist_info.items())}
    record = f"{info}/RECORD"
    lines = [record_line(name, content) for name, content in members.items()]
    members[record] = "".join([*lines, f"{record},,\n"]).encode()

    with zipfile.ZipFile(args.out, "w") as out:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, date_time=_EARLIEST_DATE)
            entry.create_system = 3  # Unix, whose file modes follow
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | file_mode(name)) << 16
            out.writestr(entry, content, compresslevel=6)


if __name__ == "__main__":
    main(sys.argv[1:])
