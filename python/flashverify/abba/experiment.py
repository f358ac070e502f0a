"""One run from options to result."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from tqdm import tqdm

import flashverify as fv
from flashverify.abba import environment, native_files, peers, reference, workload
from flashverify.abba.arms import Arm
from flashverify.abba.cache_file import CacheFile
from flashverify.abba.floors import MachineRates
from flashverify.abba.native_files import Difference, NativeMismatchError
from flashverify.abba.options import Options
from flashverify.abba.outcome import ExitCode, NotRunError
from flashverify.abba.probe import Report
from flashverify.abba.result import ArmResult, Measurement, Rate, Result
from flashverify.abba.stats import paired_ratio, summarise
from flashverify.abba.timing import CpuTimer, Timer, run_blocks

TIMERS: dict[str, Callable[[], Timer]] = {"cpu": CpuTimer}


def run(options: Options, cache_file: CacheFile | None) -> tuple[Result, ExitCode]:
    """Carries the experiment out; one that cannot be is a result too."""
    measurement, reason, code = None, None, ExitCode.DONE
    reports: dict[str, Report] = {}
    differences: tuple[Difference, ...] = ()
    try:
        timer = TIMERS[device(options.device)]()
        steps = 5 + options.warmups + options.blocks * (1 + len(options.peers))
        with tqdm(total=steps, unit="step", leave=False, disable=None) as bar:
            bar.set_description("comparing native files")
            reports = native_files.check_arms(
                {
                    "A": (options.arm_a_root, options.arm_a),
                    "B": (options.arm_b_root, options.arm_b),
                }
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
        environment=environment.describe(),
        precision_revision=fv.PRECISION_REVISION,
        reports=reports,
        differences=differences,
        reason=reason,
        measurement=measurement,
    )
    return result, code


def device(wanted: str) -> str:
    """The device to run on; raises NotRunError where there is none of the kind wanted."""
    if wanted in ("auto", "cpu"):
        return "cpu"
    if not torch.cuda.is_available():
        raise NotRunError(f"no CUDA device: torch {torch.__version__} finds none")
    if wanted not in TIMERS:
        raise NotRunError("this version of flashverify measures on the CPU only")
    return wanted


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

    bar.set_description("FP64 and FP32 references")
    exact, single = reference.fp64(inputs), reference.fp32(inputs)
    bar.update()

    bar.set_description("first run of each arm")
    arms = {
        name: Arm(name, route, inputs)
        for name, route in (("A", options.arm_a), ("B", options.arm_b))
    }
    routes = {name: arm.first_run() for name, arm in arms.items()}
    outputs = {name: arm.out.clone() for name, arm in arms.items()}
    bar.update()
    native_files.check_this_process(reports)
    bar.update()

    bar.set_description("ABBA blocks")
    rates = MachineRates(inputs)
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
            output_repeats=workload.same_bits(outputs[name], arm.out),
            workspace_bytes=arm.workspace_bytes,
        )
        for name, arm in arms.items()
    }
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
        inputs=inputs.source,
        inputs_sha256=inputs.sha256(),
        peers=peer_results,
    )


def _rate(samples_giga_per_s: Sequence[float], amount: int) -> Rate:
    best = max(samples_giga_per_s)
    return Rate(
        best=best,
        median=summarise(samples_giga_per_s).median,
        floor_us=amount / best * 1e-3,
    )
