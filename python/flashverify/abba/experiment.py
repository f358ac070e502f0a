"""One run from options to result."""

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from tqdm import tqdm

import flashverify as fv
from flashverify.abba import environment, native_files, peers, reference, workload
from flashverify.abba.arms import Arm
from flashverify.abba.cache_file import CacheFile
from flashverify.abba.cuda import CudaTimer
from flashverify.abba.floors import MachineRates
from flashverify.abba.native_files import Difference, NativeMismatchError
from flashverify.abba.options import Options
from flashverify.abba.outcome import ExitCode, NotRunError
from flashverify.abba.probe import Report
from flashverify.abba.result import ArmResult, Measurement, OtherFlush, Rate, Result
from flashverify.abba.stats import paired_ratio, summarise
from flashverify.abba.timing import CpuTimer, Timer, run_blocks

TIMERS: dict[str, Callable[[], Timer]] = {"cpu": CpuTimer, "cuda": CudaTimer}
# Measured after the main blocks, which follow a read flush.
_OTHER_FLUSHES = {"cpu": (), "cuda": ("memset", "none")}


def run(options: Options, cache_file: CacheFile | None) -> tuple[Result, ExitCode]:
    """Carries the experiment out; one that cannot be is a result too."""
    measurement, reason, code = None, None, ExitCode.DONE
    reports: dict[str, Report] = {}
    differences: tuple[Difference, ...] = ()
    where = "cpu"
    try:
        where = device(options.device)
        timer = TIMERS[where]()
        passes = 1 + len(options.peers) + len(_OTHER_FLUSHES[where])
        steps = 5 + options.warmups + options.blocks * passes
        with (
            _image(options.cuda_image, where),
            tqdm(total=steps, unit="step", leave=False, disable=None) as bar,
        ):
            bar.set_description("comparing native files")
            reports = native_files.check_arms(
                {
                    "A": (options.arm_a_root, options.arm_a),
                    "B": (options.arm_b_root, options.arm_b),
                },
                where,
            )
            bar.update()
            measurement = _measure(options, cache_file, timer, reports, bar)
    except NativeMismatchError as error:
        differences, reports = error.differences, error.reports
        reason, code = str(error), error.exit_code
    except NotRunError as error:
        reason, code = str(error), error.exit_code
    result = Result(
        options=options,
        environment=environment.describe(where),
        precision_revision=fv.PRECISION_REVISION,
        reports=reports,
        differences=differences,
        reason=reason,
        measurement=measurement,
    )
    return result, code


def device(wanted: str) -> str:
    """The device to run on; raises NotRunError where there is none of the kind wanted."""
    available = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not available):
        return "cpu"
    if not available:
        raise NotRunError(f"no CUDA device: torch {torch.__version__} finds none")
    return "cuda"


def _image(image: str | None, where: str) -> contextlib.AbstractContextManager[None]:
    """Runs the arms with a named image; raises NotRunError where there is none such."""
    if image is None:
        return contextlib.nullcontext()
    if where != "cuda":
        raise NotRunError(f"--cuda_image={image}: the arms run on the {where}")
    if image not in fv.native_info()["cuda_images"]:
        known = ", ".join(fv.native_info()["cuda_images"])
        raise NotRunError(f"--cuda_image={image}: the library has {known or 'none'}")
    return fv.cuda_image_override(image)


def _measure(
    options: Options,
    cache_file: CacheFile | None,
    timer: Timer,
    reports: dict[str, Report],
    bar: "tqdm[NoReturn]",
) -> Measurement:
    case = options.case
    # The references, the floors and the peers get the threads that the arms have.
    torch.set_num_threads(fv.get_num_threads())
    bar.set_description("filling the cache")
    inputs = workload.make(case, options.seed, cache_file)
    bar.update()

    where = device(options.device)
    on_host, inputs = inputs, inputs.on(where)
    bar.set_description("FP64 and FP32 references")
    exact, single = reference.fp64(inputs).cpu(), reference.fp32(inputs).cpu()
    bar.update()

    bar.set_description("first run of each arm")
    arms = {
        name: Arm(name, route, inputs, options.schedule)
        for name, route in (("A", options.arm_a), ("B", options.arm_b))
    }
    routes = {name: arm.first_run() for name, arm in arms.items()}
    outputs = {name: arm.out.cpu() for name, arm in arms.items()}
    bar.update()
    native_files.check_this_process(reports)
    bar.update()

    bar.set_description("ABBA blocks")
    rates = MachineRates(inputs, timer)
    blocks = run_blocks(
        arms,
        timer,
        warmups=options.warmups,
        blocks=options.blocks,
        sample=rates.sample,
        step=bar.update,
    )
    arm_results = {
        name: ArmResult(
            route=routes[name],
            latency_us=summarise(
                [slot.latency_us for block in blocks for slot in block.slots if slot.arm == name]
            ),
            error=reference.compare(outputs[name], exact),
            relative_l2_fp32=reference.compare(outputs[name], single).relative_l2,
            output_sha256=workload.tensor_sha256(outputs[name]),
            output_repeats=workload.same_bits(outputs[name], arm.out.cpu()),
            workspace_bytes=arm.workspace_bytes,
        )
        for name, arm in arms.items()
    }
    other_flushes = {}
    for flush in _OTHER_FLUSHES[where]:
        bar.set_description(f"ABBA blocks, {flush} flush")
        other_flushes[flush] = _with_flush(flush, arms, inputs, options, bar)
    peer_results = {}
    for name in options.peers:
        bar.set_description(f"peer {name}")
        peer_results[name] = peers.measure(
            name,
            inputs,
            exact,
            timer,
            warmups=options.warmups,
            repetitions=options.blocks,
            step=bar.update,
        )
    return Measurement(
        arms=arm_results,
        fp16_rounding_floor=reference.fp16_rounding_floor(exact),
        fp32_relative_l2=reference.compare(single, exact).relative_l2,
        read_gb_s=_rate(rates.read_gb_s, case.kv_live_bytes),
        matmul_gflop_s=_rate(rates.matmul_gflop_s, case.flops),
        ratio=paired_ratio([block.ratio_b_over_a() for block in blocks], options.seed),
        blocks=blocks,
        timer=timer.description,
        inputs=on_host.source,
        inputs_sha256=on_host.sha256(),
        peers=peer_results,
        device=where,
        other_flushes=other_flushes,
    )


def _with_flush(
    flush: str,
    arms: dict[str, Arm],
    inputs: workload.Workload,
    options: Options,
    bar: "tqdm[NoReturn]",
) -> OtherFlush:
    timer = CudaTimer(flush)
    rates = MachineRates(inputs, timer)
    blocks = run_blocks(
        arms, timer, warmups=0, blocks=options.blocks, sample=rates.sample, step=bar.update
    )
    return OtherFlush(
        timer=timer.description,
        latency_us={
            name: summarise(
                [slot.latency_us for block in blocks for slot in block.slots if slot.arm == name]
            )
            for name in arms
        },
        ratio=paired_ratio([block.ratio_b_over_a() for block in blocks], options.seed),
        read_us=summarise([1e-3 * options.case.kv_allocated_bytes / r for r in rates.read_gb_s]),
    )


def _rate(samples_giga_per_s: Sequence[float], amount: int) -> Rate:
    best = max(samples_giga_per_s)
    return Rate(
        best=best,
        median=summarise(samples_giga_per_s).median,
        floor_us=amount / best * 1e-3,
    )
