"""One run from options to result."""

import contextlib
import dataclasses
import datetime
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

import flashverify
from flashverify.abba import environment
from flashverify.abba.outcome import ExitCode
from tools.acceptance.exchange import ServerError
from tools.acceptance.server import Server
from tools.model_ab import arms as arms_module
from tools.model_ab import checks, scoring, texts, trials
from tools.model_ab.arms import MODEL_NAME, Arm
from tools.model_ab.checks import Check, failed, measured, not_run
from tools.model_ab.options import Options
from tools.model_ab.processes import StartedServer, StartError
from tools.model_ab.result import Result
from tools.model_ab.texts import Text
from tools.model_ab.trials import Request

# What the reference runs are called with: model dtype, cache dtype, route (None: vLLM's own).
_REFERENCES: dict[str, tuple[str, str, str | None]] = {
    "float32": ("float32", "auto", None),
    "bfloat16": ("bfloat16", "auto", "grouped_fp32"),
}

_Scores = dict[str, np.ndarray]


class _Run:
    """The state of a run, which grows check by check."""

    def __init__(self, options: Options, scratch: Path, bar: "tqdm[NoReturn]") -> None:
        self.options = options
        self.scratch = scratch
        self.bar = bar
        self.checks: dict[str, Check] = {}
        self.requests: list[Request] = []
        self.texts: list[Text] = []
        self.servers: dict[str, Any] = {}
        self.scores: dict[str, _Scores] = {}

    def carry_out(self) -> None:
        """Fills in the checks; what is left out was not run."""
        wanted = texts.read(self.options.texts, self.options.caller_folder)
        model = self._model()
        with self._arms(model) as arms:
            if arms is None:
                return
            for name, check in (
                ("routes", arms_module.check_routes(arms)),
                ("native_digests", arms_module.check_native(arms)),
            ):
                self.checks[name] = check
                if check.status == checks.FAILED:
                    return
            self._ask(arms, wanted)
            # Once more, now that calls have run.
            self.checks["routes"] = arms_module.check_routes(arms)
        self._compare_with_references(model)

    def _model(self) -> Path:
        if self.options.model is not None or not self.options.starts_servers:
            return self.options.model or Path()
        # Only now what takes seconds to import.
        from tools.capture_kv import main as capture_kv
        from tools.smollm2 import model as smollm2

        self.bar.set_description("writing the model")
        folder = self.scratch / "SmolLM2-135M-Instruct"
        smollm2.save(capture_kv.default_model(), folder)
        return folder

    @contextlib.contextmanager
    def _arms(self, model: Path) -> Iterator[dict[str, Arm] | None]:
        options = self.options
        with contextlib.ExitStack() as stack:
            found: dict[str, Arm] = {}
            try:
                for name, route in (("A", options.arm_a), ("B", options.arm_b)):
                    self.bar.set_description(f"starting arm {name}")
                    url = options.urls[name]
                    if url is None:
                        found[name] = self._start(
                            stack, name, model, "auto", options.kv_cache_dtype, route
                        )
                    else:
                        server = Server(url, timeout_s=options.timeout_s)
                        found[name] = Arm(name, server, server.model(), pid=options.pids[name])
                    self.servers[name] = {
                        "route": found[name].route,
                        "url": url,
                        "server_version": found[name].server.version(),
                    }
                    found[name].server.snapshot()
                    self.bar.update()
            except (StartError, ServerError) as error:
                # Nothing of a model was seen: no other check has a result.
                self.checks["start_up"] = failed(str(error))
                yield None
                return
            self.checks["start_up"] = measured(self.servers)
            yield found

    def _start(
        self,
        stack: contextlib.ExitStack,
        name: str,
        model: Path,
        dtype: str,
        kv_cache_dtype: str,
        route: str | None,
    ) -> Arm:
        options = self.options
        log = self.scratch / f"{name}.log"
        configuration = arms_module.configuration(
            options, model, route=route, dtype=dtype, kv_cache_dtype=kv_cache_dtype
        )
        started = StartedServer(name, configuration, log)
        stack.callback(started.stop)
        started.wait(options.start_timeout_s)
        server = Server(started.url, timeout_s=options.timeout_s)
        return Arm(name, server, MODEL_NAME, route, started, started.pid)

    def _ask(self, arms: dict[str, Arm], wanted: dict[str, str]) -> None:
        options = self.options
        try:
            self.texts = [
                texts.cut(
                    name,
                    arms["A"].server.tokenize(arms["A"].model, text),
                    options.context,
                    options.max_tokens,
                )
                for name, text in wanted.items()
            ]
        except ServerError as error:
            self.checks["outputs"] = failed(str(error))
            return
        self.bar.set_description("A B B A blocks")
        self.requests = trials.send(
            arms,
            self.texts,
            max_tokens=options.max_tokens,
            blocks=options.blocks,
            seed=options.seed,
            settle_s=options.settle_s,
            step=self.bar.update,
        )
        self.checks["acceptance"] = trials.check_acceptance(self.requests)
        self.checks["outputs"] = trials.check_outputs(self.requests)
        self.checks["latency"] = trials.check_latency(self.requests, options.seed)
        try:
            for name, arm in arms.items():
                self._score(name, arm)
        except ServerError as error:
            self.checks["logprob_distance"] = failed(str(error))

    def _score(self, name: str, arm: Arm) -> None:
        for text in self.texts:
            self.bar.set_description(f"log-probabilities, {name}")
            self.scores.setdefault(name, {})[text.name] = scoring.score(
                arm.server, arm.model, text, self.options.seed
            )
            self.bar.update()

    def _compare_with_references(self, model: Path) -> None:
        if not self.texts or "logprob_distance" in self.checks:
            return
        reasons = [] if self.options.references else ["no reference was asked for"]
        for name in self.options.references:
            dtype, kv_cache_dtype, route = _REFERENCES[name]
            try:
                with contextlib.ExitStack() as stack:
                    self.bar.set_description(f"starting reference {name}")
                    arm = self._start(stack, name, model, dtype, kv_cache_dtype, route)
                    self._score(name, arm)
            except (StartError, ServerError) as error:
                self.scores.pop(name, None)
                reasons.append(f"reference {name}: {error}")
        found = {text.name: self._distances(text.name) for text in self.texts}
        self.checks["logprob_distance"] = Check(
            checks.NOT_RUN if reasons else checks.MEASURED, "; ".join(reasons) or None, found
        )

    def _distances(self, text: str) -> dict[str, Any]:
        of_text = {name: scores[text] for name, scores in self.scores.items()}
        a, b = of_text["A"], of_text["B"]
        return {
            "tokens": len(a),
            "perplexity": {name: scoring.perplexity(scores) for name, scores in of_text.items()},
            "between_arms": dataclasses.asdict(scoring.distance(a, b)),
            "references": {
                name: dataclasses.asdict(scoring.compare(a, b, scores, self.options.seed))
                for name, scores in of_text.items()
                if name not in ("A", "B")
            },
        }


def run(options: Options) -> tuple[Result, ExitCode]:
    """Carries the experiment out; one that cannot be is a result too. Raises UsageError."""
    count = len(options.texts)
    steps = 2 + count * (4 + 4 * options.blocks + len(options.references))
    with (
        tempfile.TemporaryDirectory(prefix="model_ab_") as scratch,
        tqdm(total=steps, unit="step", leave=False, disable=None) as bar,
    ):
        state = _Run(options, Path(scratch), bar)
        state.carry_out()
    found = {
        name: state.checks.get(name) or not_run(_why_not(state.checks)) for name in checks.NAMES
    }
    result = Result(
        options=options,
        environment={
            "device": f"{environment.cpu_name()}, {environment.usable_cpus()} CPUs",
            "driver": None,
            "flashverify": flashverify.__version__,
            "precision_revision": flashverify.PRECISION_REVISION,
            "git": environment.git_revision(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "time_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        },
        servers=state.servers,
        texts=tuple(state.texts),
        checks=found,
        requests=tuple(state.requests),
    )
    return result, _exit_code(found)


def _why_not(done: dict[str, Check]) -> str:
    for name, check in done.items():
        if check.status == checks.FAILED:
            return f"{name} failed: {check.reason}"
    return "what it needs was not measured"


def _exit_code(found: dict[str, Check]) -> ExitCode:
    native = found["native_digests"]
    if native.status == checks.FAILED and native.found and native.found["differences"]:
        return ExitCode.NATIVE_DIFFERS
    whole = all(check.status == checks.MEASURED for check in found.values())
    return ExitCode.DONE if whole else ExitCode.ARM_NOT_RUN
