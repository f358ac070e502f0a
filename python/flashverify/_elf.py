"""Checks that a file is a whole shared object for this machine, before it is loaded.

The dynamic loader maps a file and believes its headers: a truncated library is a
SIGBUS in the middle of an import, where nothing can answer in words.
"""

from __future__ import annotations

import os
import platform
import stat
import struct
from pathlib import Path
from typing import Final

_IDENT: Final = struct.Struct("<4sBB10x")
# e_type, e_machine, e_version, e_entry, e_phoff, e_shoff, e_flags, e_ehsize, e_phentsize,
# e_phnum, e_shentsize, e_shnum, e_shstrndx
_HEADER: Final = struct.Struct("<HHIQQQIHHHHHH")
# p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
# sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size, sh_link, sh_info, sh_addralign,
# sh_entsize
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")

_CLASS_64, _LITTLE_ENDIAN, _SHARED_OBJECT = 2, 1, 3
_NO_BITS: Final = 8  # a section without bytes in the file, such as .bss
_MACHINES: Final = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}


def shared_object_fault(path: Path) -> str | None:
    """What keeps a file from being loaded, in words; None where nothing does.

    Checks magic, class, byte order, type and machine, and that every segment,
    the section table and every section lie within the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "not a regular file"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_IDENT.size + _HEADER.size)
            if not head:
                return "the file is empty"
            if head[:4] != b"\x7fELF"[: len(head)]:
                return f"not an ELF file: it begins with {head[:4]!r}"
            if len(head) < _IDENT.size + _HEADER.size:
                return f"truncated: {size} bytes, less than an ELF header"
            _, elf_class, byte_order = _IDENT.unpack_from(head)
            if (elf_class, byte_order) != (_CLASS_64, _LITTLE_ENDIAN):
                return (
                    f"ELF class {elf_class}, byte order {byte_order}; "
                    "accepted: a 64-bit little-endian file"
                )
            (kind, machine, _, _, segments_at, sections_at, *_, segment_bytes, segments,
             section_bytes, sections, _) = _HEADER.unpack_from(head, _IDENT.size)  # fmt: skip
            if kind != _SHARED_OBJECT:
                return f"ELF type {kind}; accepted: {_SHARED_OBJECT} (a shared object)"
            expected = _MACHINES.get(platform.machine())
            if expected is not None and machine != expected:
                return (
                    f"built for ELF machine {machine}; accepted: {expected} ({platform.machine()})"
                )
            if segments == 0 or segment_bytes != _SEGMENT.size:
                return f"{segments} segments of {segment_bytes} bytes: not a shared object"
            for what, at, count, item_bytes in (
                ("program headers", segments_at, segments, segment_bytes),
                ("section headers", sections_at, sections, section_bytes),
            ):
                if at + count * item_bytes > size:
                    return _truncated(what, at + count * item_bytes, size)
            file.seek(segments_at)
            table = file.read(segments * segment_bytes)
            for _, _, offset, _, _, file_bytes, _, _ in _SEGMENT.iter_unpack(table):
                if offset + file_bytes > size:
                    return _truncated("a segment", offset + file_bytes, size)
            if sections and section_bytes == _SECTION.size:
                file.seek(sections_at)
                table = file.read(sections * section_bytes)
                for _, kind, _, _, offset, file_bytes, *_ in _SECTION.iter_unpack(table):
                    if kind != _NO_BITS and offset + file_bytes > size:
                        return _truncated("a section", offset + file_bytes, size)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _truncated(what: str, end: int, size: int) -> str:
    return f"truncated: {what} should end at byte {end}, and the file has {size}"
