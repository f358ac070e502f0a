"""A result in words and tables, for the terminal and for abba.md."""

from collections.abc import Sequence

from flashverify.abba.case import Case, format_bytes
from flashverify.abba.native_files import Difference
from flashverify.abba.result import Measurement, Result
from flashverify.abba.stats import Summary
from flashverify.abba.timing import ORDER

# A table's header and rows, and what there is to say below it.
_Section = tuple[list[str], list[list[str]], list[str]]

# The first columns of every table are words, the others numbers.
_WORD_COLUMNS = 2


def for_terminal(result: Result) -> str:
    """The result as it is printed."""
    lines = [*_head(result), ""]
    if result.measurement is None:
        return "\n".join([*lines, f"NOT RUN: {result.reason}"])
    for header, rows, notes in (_times(result), _errors(result.measurement)):
        lines += [*plain_table(header, rows), "", *notes, ""]
    return "\n".join(lines[:-1])


def for_markdown(result: Result) -> str:
    """The contents of abba.md."""
    lines = ["# ABBA", "", *(f"- {line}" for line in _head(result)), ""]
    if result.measurement is None:
        lines += [f"**Not run**: {result.reason}", ""]
        if result.differences:
            lines += [*markdown_table(*_differences(result.differences)), ""]
    else:
        for title, (header, rows, notes) in (
            ("Time", _times(result)),
            ("Error", _errors(result.measurement)),
        ):
            lines += [f"## {title}", "", *markdown_table(header, rows), ""]
            lines += [*(f"- {note}" for note in notes), ""]
        lines += ["![times, ratios and errors](abba.png)", ""]
    lines += ["## Environment", ""]
    for name, value in result.environment.items():
        lines.append(f"- {name}: {'none' if value is None else value}")
    lines += [f"- command: `{result.options.command}`", ""]
    reports = list(result.reports.values())
    if reports and not result.differences:
        lines += ["## Native files, the same in both arms' processes", ""]
        files = [[f["name"], f["sha256"], f"{f['size_bytes']:,}"] for f in reports[0]["files"]]
        lines += [*markdown_table(["file", "SHA-256", "bytes"], files), ""]
    return "\n".join(lines)


def differences_for_terminal(differences: Sequence[Difference]) -> str:
    """What differs between the arms, with the paths."""
    return "\n".join(plain_table(*_differences(differences)))


def describe_case(case: Case) -> str:
    """The case in one line."""
    requests = "1 request" if case.batch == 1 else f"{case.batch} requests"
    return (
        f"{requests} x {case.context:,} keys, q_len {case.q_len}, "
        f"{case.q_heads} query / {case.kv_heads} KV heads, head_dim {case.head_dim}, "
        f"{case.kv_dtype}, page {case.page_size}: {format_bytes(case.kv_live_bytes)} of K and V"
    )


def microseconds(value: float) -> str:
    """A time in microseconds, without its unit."""
    return f"{value:,.1f}" if value < 99_999.95 else f"{value:,.0f}"


def ratio_in_words(found: Measurement) -> str:
    """What the ratio says, and how sure it is."""
    ratio = found.ratio
    if ratio.ci95 is None:
        return f"B / A = {ratio.median:.4f} (one block gives no interval)"
    low, high = ratio.ci95
    if low > 1:
        verdict = f"B takes {100 * (ratio.median - 1):.1f} % longer than A"
    elif high < 1:
        verdict = f"B takes {100 * (1 - ratio.median):.1f} % less time than A"
    else:
        verdict = "no difference shown"
    return (
        f"B / A = {ratio.median:.4f}, 95 % interval [{low:.4f}, {high:.4f}] "
        f"from {len(found.blocks)} paired {ORDER} blocks: {verdict}"
    )


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned with spaces, words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index < _WORD_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as a Markdown table."""
    rule = ["---" if index < _WORD_COLUMNS else "---:" for index in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _head(result: Result) -> list[str]:
    environment = result.environment
    lines = [
        describe_case(result.options.case),
        f"on {_where(environment)}, torch {environment['torch']}",
        f"flashverify {environment['flashverify']}, precision revision {result.precision_revision}",
    ]
    if result.measurement is not None:
        lines.append(f"inputs: {result.measurement.inputs}")
    if result.reports and not result.differences:
        report = next(iter(result.reports.values()))
        lines.append(
            f"both arms: build {report['build_id']}, the same {len(report['files'])} native files"
        )
    return lines


def _times(result: Result) -> _Section:
    found = result.measurement
    assert found is not None
    byte_floor, flop_floor = found.read_gb_s, found.matmul_gflop_s

    def row(name: str, what: str, latency: Summary) -> list[str]:
        times = [latency.median, latency.mad, latency.p10, latency.p90]
        floors = [latency.median / floor for floor in (byte_floor.floor_us, flop_floor.floor_us)]
        return [name, what, *map(microseconds, times), *(f"{ratio:.2f}" for ratio in floors)]

    header = ["arm", "route", "median us", "MAD us", "p10 us", "p90 us"]
    header += ["x byte floor", "x arith. floor"]
    rows = [row(name, arm.route, arm.latency_us) for name, arm in found.arms.items()]
    notes = [
        f"byte floor {microseconds(byte_floor.floor_us)} us: "
        f"{result.options.case.kv_live_bytes:,} bytes at {byte_floor.best:.1f} GB/s "
        f"(median {byte_floor.median:.1f})",
        f"arithmetic floor {microseconds(flop_floor.floor_us)} us: "
        f"{result.options.case.flops / 1e9:,.3g} GFLOP at {flop_floor.best:,.0f} GFLOP/s "
        f"(median {flop_floor.median:,.0f})",
    ]
    for name, peer in found.peers.items():
        if peer.latency_us is not None:
            rows.append(row("peer", name, peer.latency_us))
            notes.append(f"peer {name}: {peer.description}")
        else:
            notes.append(f"peer {name}: not run: {peer.reason}")
    for flush, other in found.other_flushes.items():
        times = ", ".join(
            f"{name} {microseconds(latency.median)} us"
            for name, latency in other.latency_us.items()
        )
        notes.append(
            f"{flush} flush: {times}, B / A = {other.ratio.median:.4f}; "
            f"a read of the caches {microseconds(other.read_us.median)} us"
        )
    return header, rows, [*notes, ratio_in_words(found)]


def _where(environment: dict[str, object]) -> str:
    if environment["cuda_image"] is not None:
        return (
            f"{environment['device']}, image {environment['cuda_image']}, "
            f"driver {environment['driver']}"
        )
    return f"{environment['device']}, {environment['cpu_isa']}, {environment['threads']} threads"


def _errors(found: Measurement) -> _Section:
    floor = found.fp16_rounding_floor

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4e}"

    def row(name: str, what: str, relative_l2: float | None, *others: float | None) -> list[str]:
        against_floor = relative_l2 / floor if relative_l2 is not None and floor else None
        shown = "-" if against_floor is None else f"{against_floor:.3f}"
        return [name, what, number(relative_l2), shown, *map(number, others)]

    header = ["arm", "route", "rel. L2", "x FP16 floor", "max row", "max abs", "rel. L2 to FP32"]
    rows = [
        row(
            name,
            arm.route,
            arm.error.relative_l2,
            arm.error.max_row_relative_l2,
            arm.error.max_abs,
            arm.relative_l2_fp32,
        )
        for name, arm in found.arms.items()
    ]
    none = (None, None, None)
    for name, peer in found.peers.items():
        if peer.latency_us is not None:
            rows.append(row("peer", name, peer.relative_l2, *none))
    rows.append(row("", "FP16 rounding floor", floor, *none))
    rows.append(row("", "FP32 PyTorch eager", found.fp32_relative_l2, *none))
    notes = ["rel. L2, max row and max abs are against FP64 over the same bytes, scales and query"]
    for name, arm in found.arms.items():
        if arm.error.nonfinite_elements:
            notes.append(
                f"arm {name}: {arm.error.nonfinite_elements} output elements are NaN or infinite"
            )
        if not arm.output_repeats:
            notes.append(f"arm {name}: the first and the last call gave different bits")
    return header, rows, notes


def _differences(differences: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [difference.name, side, difference.sha256[side] or "not mapped", path or "-"]
        for difference in differences
        for side, path in difference.path.items()
    ]
    return ["file", "side", "SHA-256", "path"], rows
