"""The cases of test_hook.py, read by pytest and by every rank."""

from dataclasses import dataclass

from mppo.config import ParallelConfig

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SP = {"sequence_parallel": True}

LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "single": (1, ParallelConfig()),
    "tp2": (2, ParallelConfig(**TP2)),
    "tp2-sp": (2, ParallelConfig(**TP2, **SP)),
    "pp2": (2, ParallelConfig(**PP2)),
    "pp2-vpp2": (2, ParallelConfig(**PP2, **VPP2)),
    "pp4": (4, ParallelConfig(pipeline_model_parallel_size=4)),
    "dp2": (2, ParallelConfig()),
    "cp2": (2, ParallelConfig(**CP2)),
    "tp2-cp2-sp": (4, ParallelConfig(**TP2, **CP2, **SP)),
    "pp2-vpp2-cp2": (4, ParallelConfig(**PP2, **VPP2, **CP2)),
    "cp2-dp2": (4, ParallelConfig(**CP2)),
    "tp2-pp2-sp": (4, ParallelConfig(**TP2, **PP2, **SP)),
    "tp2-pp2-vpp2-sp": (4, ParallelConfig(**TP2, **PP2, **VPP2, **SP)),
    "pp2-dp2": (4, ParallelConfig(**PP2)),
    "tp2-dp2": (4, ParallelConfig(**TP2)),
}
"""Number of processes and parallel sizes."""

EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}

EXPERT_LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "ep2-dp2": (2, ParallelConfig(**EP2)),
    "tp2-ep2-sp": (2, ParallelConfig(**TP2, **EP2, **SP)),
    "cp2-ep2": (2, ParallelConfig(**CP2, **EP2)),
    "pp2-ep2-dp2": (4, ParallelConfig(**PP2, **EP2)),
    "pp2-vpp2-ep2-dp2": (4, ParallelConfig(**PP2, **VPP2, **EP2)),
    "tp2-pp2-ep2-sp": (4, ParallelConfig(**TP2, **PP2, **EP2, **SP)),
    "tp2-ep2-sp-dp2": (4, ParallelConfig(**TP2, **EP2, **SP)),
    "cp2-ep4-dp2": (4, ParallelConfig(**CP2, **EP4)),
}
"""Those that deal experts out: over data-, tensor- and context-parallel ranks."""

ALONE = [[[0, 1, 2], [3], [], [4, 5, 6, 7]]]
UNEVEN = [[[0, 1], [2, 3], [4, 5], []], [[7], [], [], [6]]]
IDLE = [[[0, 1], [2, 3], [5, 6], [7]], [[], [4], [], []]]
"""Trajectory 4 trains nothing, so the second rank has nothing to train."""


@dataclass(frozen=True)
class Case:
    layout: str
    model: str = "llama"
    mode: str = "token-mean"
    temperature: float = 1.0
    idle_rank: bool = False
    vocabulary_multiple: int = 8
    aux_loss_coeff: float = 0.0
    """Of the load-balancing loss of a mixture of experts."""

    @property
    def name(self) -> str:
        parts = [self.layout, self.model, self.mode, f"T{self.temperature}", f"V{self.vocabulary_multiple}"]
        return "-".join(parts + ["idle"] * self.idle_rank + ["aux"] * (self.aux_loss_coeff > 0))

    @property
    def processes(self) -> int:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout][0]

    @property
    def parallel(self) -> ParallelConfig:
        return (LAYOUTS | EXPERT_LAYOUTS)[self.layout][1]

    @property
    def parts(self) -> list[list[list[int]]]:
        """The trajectories of each micro-batch of each data-parallel rank."""
        if "dp2" not in self.layout:
            return ALONE
        return IDLE if self.idle_rank else UNEVEN


MOE_LAYOUTS = ("single", "tp2-sp", "pp2", "cp2", "dp2", "tp2-cp2-sp", "tp2-pp2-vpp2-sp", *EXPERT_LAYOUTS)
"""Without and with expert parallelism."""

MODES = ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

CASES = sorted(
    [
        *(Case(layout) for layout in LAYOUTS),
        *(Case(layout, "reward") for layout in LAYOUTS),
        *(Case(layout, mode=mode) for layout in ("single", "dp2", "cp2", "tp2-pp2-sp") for mode in MODES),
        *(Case(layout, "reward", mode=mode) for layout in ("dp2",) for mode in MODES),
        *(Case(layout, temperature=0.7) for layout in ("single", "tp2", "pp2-dp2", "tp2-pp2-sp")),
        *(Case(layout, model, idle_rank=True) for layout in ("dp2", "pp2-dp2") for model in ("llama", "reward")),
        *(
            Case(layout, model)
            for layout in ("single", "tp2", "pp2", "cp2", "tp2-pp2-sp")
            for model in ("llama-tied", "qwen2", "qwen2-tied", "qwen3", "reward-tied")
        ),
        *(Case(layout, "llama-five-layers") for layout in ("pp2", "pp4", "pp2-vpp2")),
        *(Case("pp2-vpp2", model) for model in ("llama-tied", "qwen3")),
        *(Case(layout, "llama-tied", vocabulary_multiple=128) for layout in ("tp2", "tp2-pp2-sp")),
        *(Case(layout, model) for layout in ("single", "tp2") for model in ("llama-rope", "llama-mha")),
        *(Case(layout, "qwen3-moe") for layout in MOE_LAYOUTS),
        *(Case(layout, "qwen3-moe", aux_loss_coeff=0.02) for layout in MOE_LAYOUTS),
        *(
            Case(layout, model)
            for layout in ("single", "ep2-dp2", "tp2-pp2-ep2-sp")
            for model in ("qwen3-moe-raw", "reward-qwen3-moe")
        ),
    ],
    key=lambda case: (case.processes, case.layout),
)
"""Ordered so that those of one number of processes, and of one layout, come together."""
