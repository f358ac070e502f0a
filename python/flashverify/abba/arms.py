"""The two arms: a route of the library bound to the shared workload."""

from collections.abc import Callable

import torch

import flashverify as fv
from flashverify.abba.cuda import captured
from flashverify.abba.outcome import NotRunError
from flashverify.abba.workload import Workload


class Arm:
    """One route over a workload, with an output and a workspace of its own.

    Called, it makes one pass: on the CPU a call of the library, on CUDA the replay of a
    captured one.
    """

    def __init__(
        self, name: str, route: str, workload: Workload, schedule: str | None = None
    ) -> None:
        self.name = name
        self.route = fv.Route(route)
        # Not written yet must not pass for an answer.
        self.out = torch.full_like(workload.q, float("nan"))
        self._workload = workload
        case = workload.case
        try:
            self._workspace = fv.Workspace(
                workload.q.device,
                batch=case.batch,
                rows=case.rows,
                q_heads=case.q_heads,
                kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                max_seq_len=case.context,
                page_size=case.page_size,
                routes=(self.route,),
                q_dtype=workload.q.dtype,
                kv_dtype=workload.k_cache.dtype,
                schedule=schedule,
            )
        except fv.FlashVerifyError as error:
            raise self._not_run(error) from error
        self.workspace_bytes = self._workspace.nbytes
        self._pass: Callable[[], None] = self._attend

    def __call__(self) -> None:
        """One pass. Raises what the library raises."""
        self._pass()

    def _attend(self) -> None:
        workload = self._workload
        fv.paged_attention(
            workload.q,
            workload.k_cache,
            workload.v_cache,
            workload.page_table,
            workload.seq_lens,
            scale=workload.softmax_scale,
            k_dequant_scale=workload.k_dequant_scale,
            v_dequant_scale=workload.v_dequant_scale,
            route=self.route,
            workspace=self._workspace,
            out=self.out,
        )

    def first_run(self) -> str:
        """Runs once and returns the route that the native side says ran.

        Raises NotRunError where the library refuses, or runs another route.
        """
        try:
            self()
        except fv.FlashVerifyError as error:
            raise self._not_run(error) from error
        ran = fv.last_route()
        if ran != self.route:
            raise NotRunError(f"arm {self.name}: {self.route.value} was named, and {ran} ran")
        if self.out.device.type == "cuda":
            self._pass = captured(self._attend)
            self._pass()
            self._workspace.check_faults()
        return ran.value

    def _not_run(self, error: fv.FlashVerifyError) -> NotRunError:
        return NotRunError(f"arm {self.name} ({self.route.value}) cannot run: {error}")
