"""What ptxas says of the kernels' resources.

A spill, or fewer warps per multiprocessor than planned, is an error. The registers of
the kernels for sm_70 and sm_75, which use nearly all there are, are reviewed: a change
is one of resources.tsv too.
"""

import difflib
import re
from pathlib import Path

FOLDER = Path("native/cuda")  # a test starts in its runfiles
GOLDEN = FOLDER / "resources.tsv"
REVIEWED = "grouped_sm70_"
HEADER = "# image\tarchitecture\tkernel\tregisters\tstack\tspill stores\tspill loads\tshared\n"

REGISTERS = 65536  # of a multiprocessor, on every architecture
REGISTER_UNIT = 256  # a warp's are given out in such pieces
MOST_WARPS = {"sm_75": 32, "sm_86": 48, "sm_89": 48, "sm_120": 48}
SHARED_BYTES = {"sm_70": 96, "sm_75": 64, "sm_80": 164, "sm_90": 228, "sm_100": 228}  # else 100 KiB

# (kernel, threads of a block, warps that a multiprocessor must hold at least). The
# grouped kernels are made for one block: their registers and shared memory hide the
# latencies that warps do elsewhere.
PLANS = (
    (r"grouped_.*", 256, 8),
    (r"scalar_.*", 128, 24),
    (r"append_kv_.*", 256, 32),
    (r"merge_states", 128, 32),
)


def reports():
    """The lines of all reports as the golden file has them."""
    lines = []
    for path in sorted(FOLDER.glob("*.resources.tsv")):
        image, arch = path.name[: -len(".resources.tsv")].rsplit(".", 1)
        lines += [
            f"{image}\t{arch}\t{line}\n" for line in path.read_text(encoding="utf-8").splitlines()
        ]
    return lines


def warps(registers, shared_bytes, threads, arch):
    """Warps of such blocks that a multiprocessor holds."""
    per_block = threads // 32
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    blocks = min(REGISTERS // per_warp // per_block, MOST_WARPS.get(arch, 64) // per_block)
    if shared_bytes:
        blocks = min(blocks, SHARED_BYTES.get(arch, 100) * 1024 // shared_bytes)
    return blocks * per_block


def test_no_report_is_missing():
    found = {tuple(line.split("\t")[:2]) for line in reports()}
    for image in ("scalar", "states", "cache_write"):
        assert {(image, "sm_70"), (image, "sm_90"), (image, "sm_120")} <= found
    for kv in ("e4m3", "e5m2", "f16"):
        for dim in (64, 128, 256):
            image = f"grouped_sm70_{kv}_d{dim}"
            assert {(image, "sm_70"), (image, "sm_75")} <= found


def spills(line):
    """Whether a line tells of registers kept in memory."""
    _, _, kernel, _, stack, stores, loads, _ = line.split("\t")
    return (stores, loads) != ("0", "0") or (kernel.startswith("grouped_") and stack != "0")


def test_nothing_spills():
    assert not [line for line in reports() if spills(line)]


def test_a_spill_is_noticed():
    assert spills("i\tsm_70\tscalar_fp32_e4m3\t32\t8\t8\t0\t0\n")
    assert spills("i\tsm_70\tscalar_fp32_e4m3\t32\t8\t0\t8\t0\n")
    assert spills("i\tsm_70\tgrouped_fp32_e4m3_d64_r8\t32\t8\t0\t0\t0\n")
    # An array with an index of run time, by choice.
    assert not spills("i\tsm_70\tmerge_states\t32\t256\t0\t0\t0\n")


def test_occupancy_is_as_planned():
    for line in reports():
        _, arch, kernel, registers, _, _, _, shared = line.split("\t")
        _, threads, planned = next(plan for plan in PLANS if re.fullmatch(plan[0], kernel))
        held = warps(int(registers), int(shared), threads, arch)
        assert held >= planned, f"{kernel} for {arch}: {held} warps, planned {planned}"


def test_occupancy_is_counted_in_blocks():
    assert warps(255, 0, 256, "sm_70") == 8
    assert warps(32, 0, 256, "sm_70") == 64
    assert warps(32, 0, 256, "sm_75") == 32
    assert warps(33, 0, 256, "sm_70") == 48  # a warp takes 1280 registers, not 1056
    assert warps(32, 40 * 1024, 256, "sm_70") == 16


def test_resources_are_the_reviewed_ones():
    expected = GOLDEN.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [HEADER, *(line for line in reports() if line.startswith(REVIEWED))]
    difference = "".join(difflib.unified_diff(expected, found, str(GOLDEN), str(GOLDEN), n=0))
    assert found == expected, f"If this is meant, apply it with `patch -p0`:\n{difference}"
