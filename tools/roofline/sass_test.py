import struct

import pytest

from tools.roofline.sass import CubinError, Mix, kernels

HMMA, F2F, LDS, STS, LDG, OTHER = 0x036, 0x104, 0x184, 0x188, 0x181, 0x010
WIDE, NARROW = 6 << 9, 4 << 9


def code(*operations):
    """Machine code of (operation, second word) pairs."""
    return b"".join(struct.pack("<QQ", low | 0x7000, high) for low, high in operations)


def cubin(path, sections):
    """Writes an ELF file with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in sections) + b".shstrtab\0"
    bodies = [*sections.values(), names]
    offsets, at = [], 64
    for body in bodies:
        offsets.append(at)
        at += len(body)
    headers = [bytes(64)]
    for name, body, offset in zip([*sections, ".shstrtab"], bodies, offsets, strict=True):
        start = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, offset, len(body), 0, 0, 16, 0))
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 40, at)
    struct.pack_into("<HHH", header, 58, 64, len(headers), len(headers) - 1)
    path.write_bytes(bytes(header) + b"".join(bodies) + b"".join(headers))
    return path


def grouped():
    gap = [(OTHER, 0)] * 50
    keys = [(HMMA, 0), (LDS, WIDE), (OTHER, 0), (HMMA, 0)]
    softmax = [(F2F, 0), (STS, NARROW), (F2F, 0)]
    rare = [(F2F, 0)]
    values = [(HMMA, 0), (LDG, WIDE), (HMMA, 0)]
    return code(*gap, *keys, *gap, *rare, *gap, *softmax, *gap, *values, *gap, *values, *gap)


def test_hot_code_is_told_apart(tmp_path):
    path = cubin(tmp_path / "x.cubin", {".text.grouped_fp32_e4m3_d64_r8": grouped()})
    (kernel,) = kernels(path)
    assert kernel.name == "grouped_fp32_e4m3_d64_r8"
    assert kernel.keys == Mix(4, 2, 0, 4, 0)
    assert kernel.softmax == Mix(3, 0, 2, 1, 0)
    assert kernel.values == Mix(6, 4, 0, 0, 2)
    assert kernel.instructions == 50 * 6 + 4 + 1 + 3 + 6


def test_other_kernels_and_empty_instances_are_left_out(tmp_path):
    path = cubin(
        tmp_path / "x.cubin",
        {
            ".text.scalar_fp32_e4m3": code((OTHER, 0)),
            ".text.grouped_half_e4m3_d64_r8": grouped(),
        },
    )
    assert [kernel.name for kernel in kernels(path)] == ["grouped_half_e4m3_d64_r8"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({".text.scalar": code((OTHER, 0))}, "no grouped kernel"),
        ({".text.grouped_x": code((HMMA, 0))}, "1 runs of HMMA"),
        (
            {".text.grouped_x": code((HMMA, 0), *[(OTHER, 0)] * 50, (HMMA, 0))},
            "no conversion to FP16",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, sections, message):
    with pytest.raises(CubinError, match=message):
        kernels(cubin(tmp_path / "x.cubin", sections))


def test_ptx_is_refused(tmp_path):
    path = tmp_path / "x.ptx"
    path.write_text(".version 8.7")
    with pytest.raises(CubinError, match="not an ELF file"):
        kernels(path)
