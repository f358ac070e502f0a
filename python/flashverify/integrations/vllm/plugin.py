"""The entry point: makes flashverify vLLM's attention backend. Imports vLLM."""

from __future__ import annotations

import logging
from typing import Final

from flashverify.integrations.vllm import engine

_log: Final = logging.getLogger("vllm.flashverify")
_BACKENDS: Final = "flashverify.integrations.vllm.backend"


def register() -> None:
    """Registers the backends, in each process of the engine; a second call does nothing new.

    On a CPU it takes the place of vLLM's only attention backend, CPU_ATTN. Elsewhere it
    is the backend CUSTOM, which the user names: ``--attention-backend CUSTOM``.

    Raises:
      UnsupportedError: This vLLM is not one that the integration knows.
    """
    engine.check_interfaces()
    names = engine.AttentionBackendEnum
    engine.register_backend(names.CUSTOM, f"{_BACKENDS}.CustomBackend")
    if engine.current_platform.is_cpu():
        engine.register_backend(names.CPU_ATTN, f"{_BACKENDS}.CpuBackend")
        _log.info("flashverify takes the place of the attention backend CPU_ATTN")
    else:
        _log.info("flashverify is the attention backend CUSTOM (--attention-backend CUSTOM)")
