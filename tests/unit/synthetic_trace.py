"""Chrome traces as torch's profiler writes them, with known contents."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = (
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn>(Params)"
)
NORM = "void flashinfer::norm::FusedAddRMSNormKernel<8, __nv_bfloat16>(...)"


@dataclass
class TraceMaker:
    """Builds one rank's trace; times in microseconds."""

    now: float = 1000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    correlation: int = 0

    def kernel(
        self, name: str, us: float, *, stream: int = 7, at: float | None = None, **args: Any
    ) -> None:
        """A kernel of the launch that was opened last; without `at` it follows what came before."""
        start = self.now if at is None else at
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": us,
                "args": {"stream": stream, "device": 0, "correlation": self.correlation, **args},
            }
        )
        if at is None:
            self.now += us

    def idle(self, us: float) -> None:
        self.now += us

    def step(self, kind: str, batch: int, *, annotate: str = "host") -> None:
        """Open a step: one graph launch, early on the host's time line as in a real server."""
        self.correlation += 1
        host = self.now - 700.0
        name = f"step[{kind} bs={batch}]"
        if annotate == "host":
            self.events.append(_span("user_annotation", name, host, 120.0))
        self.events.append(
            _span(
                "cuda_runtime", "cudaGraphLaunch", host + 40.0, 60.0, correlation=self.correlation
            )
        )
        # Things of the same trace that must not be mistaken for passes.
        self.events.append(_span("cpu_op", "aten::copy_", host + 10.0, 5.0))
        self.events.append(_span("user_annotation", "scheduler.run_batch", host - 20.0, 200.0))

    def device_annotation(self, kind: str, batch: int, start: float) -> None:
        name = f"step[{kind} bs={batch}]"
        self.events.append(_span("gpu_user_annotation", name, start, self.now - start))

    def save(self, path: Path) -> Path:
        """Write the trace; gzip when the name ends in .gz."""
        data = json.dumps({"schemaVersion": 1, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def _span(category: str, name: str, start: float, us: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 4242,
        "tid": 4242,
        "ts": start,
        "dur": us,
        "args": args,
    }


def verify_pass(
    maker: TraceMaker,
    *,
    layers: int = 61,
    sum_us: float | Iterable[float] = 205.0,
    pass_us: float = 30_000.0,
    norm_us: float = 3.0,
    kind: str = "VERIFY",
    batch: int = 1,
    annotate: str = "host",
) -> None:
    """A pass whose 2 x layers sums take `sum_us` each and whose compute fills it up to `pass_us`."""
    count = 2 * layers
    sums = [sum_us] * count if isinstance(sum_us, float) else list(sum_us)
    compute = (pass_us - sum(sums)) / count
    maker.step(kind, batch, annotate=annotate)
    start = maker.now
    for us in sums:
        maker.kernel(GEMM, compute - norm_us)
        maker.kernel(NCCL, us)
        maker.kernel(NORM, norm_us)
    if annotate == "device":
        maker.device_annotation(kind, batch, start)
