"""The arms of a run: servers by address, or vLLM with a route of flashverify."""

import dataclasses
import json
import re
from pathlib import Path

from flashverify.abba.native_files import compare
from tools.acceptance.server import Server
from tools.model_ab import processes
from tools.model_ab.checks import Check, failed, measured, not_run
from tools.model_ab.options import Options
from tools.model_ab.processes import Configuration, StartedServer

# What flashverify's vLLM plugin logs when it takes the attention over, and of the first call.
_ROUTE = re.compile(
    r"flashverify: (?:route (\w+) controls the attention of|the first attention call ran (\w+),)"
)

MODEL_NAME = "model"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A server that answers: ``route`` where one was asked for, ``started`` where by us."""

    name: str
    server: Server
    model: str
    route: str | None = None
    started: StartedServer | None = None
    pid: int | None = None


def configuration(
    options: Options, model: Path, *, route: str | None, dtype: str, kv_cache_dtype: str
) -> Configuration:
    """VLLM with flashverify's ``route``; None is vLLM's own attention."""
    arguments = [
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--max-model-len", str(options.context), "--seed", str(options.seed)),
        *("--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype),
        "--enforce-eager",
    ]
    if options.speculative_tokens:
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": options.speculative_tokens,
            "prompt_lookup_max": 4,
        }
        arguments += ["--speculative-config", json.dumps(speculation)]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Threads of two servers that spin would take each other's time.
        "OMP_WAIT_POLICY": "passive",
    }
    # vLLM on a CPU is an order slower under the other OpenMP library of its environment.
    openmp = options.vllm_python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    if route is None:
        # No plugin of that name: vLLM's own backend serves.
        environment["VLLM_PLUGINS"] = "none"
    else:
        settings = {
            "route": route,
            "row_invariant_linears": options.row_invariant_linears,
        }
        arguments += ["--additional-config", json.dumps({"flashverify": settings})]
    return Configuration(options.vllm_python, [*arguments, *options.server_args], environment)


def check_routes(arms: dict[str, Arm]) -> Check:
    """Which route each started server says is in control, against what it was asked for."""
    found = {}
    for name, arm in arms.items():
        if arm.started is None or arm.route is None:
            return not_run(f"arm {name} is a server by address: its log is not here")
        matches = _ROUTE.findall(arm.started.log_text())
        if not matches:
            return failed(f"arm {name}: no line of its log says that flashverify is in control")
        found[name] = sorted({planned or ran for planned, ran in matches})
        if found[name] != [arm.route]:
            return failed(f"arm {name}: {arm.route} was asked for, {found[name]} runs", found)
    return measured(found)


def check_native(arms: dict[str, Arm]) -> Check:
    """Digests of the native files of both servers, from their processes and their Python."""
    files = {}
    for name, arm in arms.items():
        if arm.pid is None:
            flag = f"--arm_{name.lower()}_pid"
            return not_run(f"arm {name} is a server by address: name its process by {flag}")
        try:
            files[name] = processes.native_files(arm.pid)
        except RuntimeError as error:
            return not_run(f"arm {name}: {error}")
    differences = compare(dict(files))
    summary = {
        "identical": not differences,
        "files": [
            # By name and digest: where the files lay on this machine tells others nothing.
            {"name": f["name"], "sha256": f["sha256"], "size_bytes": f["size_bytes"]}
            for f in next(iter(files.values()))
        ],
        "differences": [{"name": item.name, "sha256": item.sha256} for item in differences],
        "flashverify": {},
    }
    for name, arm in arms.items():
        if arm.started is None:
            continue
        try:
            info = arm.started.native_info()
        except processes.StartError as error:
            return failed(str(error), summary)
        told = {key: info.get(key) for key in _TOLD}
        summary["flashverify"][name] = told  # type: ignore[index]
        mapped = {file["sha256"] for file in files[name]}
        for key in ("library_sha256", "extension_sha256"):
            if told[key] not in mapped:
                return failed(
                    f"arm {name}: its Python's {key} is {told[key]}, which its server has not "
                    "mapped",
                    summary,
                )
    if differences:
        names = ", ".join(sorted({item.name for item in differences}))
        return failed(f"the arms' native files differ: {names}", summary)
    return measured(summary)


_TOLD = (
    "version", "precision_revision", "build_id", "library_sha256", "extension_sha256", "cpu_isa",
)  # fmt: skip
