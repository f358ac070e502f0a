"""A captured attention call, whose inputs change between replays."""

from typing import Any

import torch

import flashverify as fv
from tests.support import backends, cases

TENSORS = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "query_start_loc")


class Captured:
    """One call in a CUDA graph. Cases put into it later must have the same shapes.

    Output and LSE hold NaN before each replay, so that a row that is not written shows.
    """

    def __init__(self, case: cases.Case, backend: backends.Backend, route: str) -> None:
        self.backend, self.route = backend, route
        self.inputs = backends.arguments(case, "cuda")
        self.out = torch.empty(case.q.shape, dtype=torch.float32, device="cuda")
        self.workspace = fv.Workspace.unplanned("cuda")
        self.graph = torch.cuda.CUDAGraph()
        self._attend()  # loads the code and sizes the workspace
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            _, self.lse = self._attend()

    def _attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self.backend.selected():
            out, lse = fv.paged_attention(
                **self.inputs,
                route=fv.Route(self.route),
                workspace=self.workspace,
                out=self.out,
                return_lse=True,
            )
        return out, lse

    def put(self, **changed: Any) -> None:
        """Copies new contents into the tensors that the graph reads."""
        for name, value in changed.items():
            self.inputs[name].copy_(value)

    def replay(self) -> backends.Result:
        """What the graph writes for the inputs as they are now."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.graph.replay()
        return backends.Result(self.out.cpu(), self.lse.cpu())

    def eager(self) -> backends.Result:
        """What an ordinary call writes for the same inputs."""
        self.out.fill_(float("nan"))
        _, lse = self._attend()
        return backends.Result(self.out.cpu(), lse.cpu())
