"""What is saved under one layout and loaded under others; four processes."""

from dataclasses import dataclass

from mppo.config import ParallelConfig


def _parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        sequence_parallel=tp > 1,
    )


LAYOUTS = {
    "dp4": _parallel(),
    "tp2-pp2": _parallel(tp=2, pp=2),
    "tp4": _parallel(tp=4),
    "pp2-vpp2": _parallel(pp=2, vpp=2),
    "tp2-cp2": _parallel(tp=2, cp=2),
    "ep2-dp4": _parallel(ep=2),
    "ep4": _parallel(ep=4),
    "tp2-pp2-ep2": _parallel(tp=2, pp=2, ep=2),
}
DENSE = ("dp4", "tp2-pp2", "tp4", "pp2-vpp2", "tp2-cp2")
EXPERTS = ("dp4", "ep2-dp4", "ep4", "tp2-pp2-ep2")


@dataclass(frozen=True)
class Setting:
    """A layout and an optimizer."""

    layout: str
    distributed: bool

    def __str__(self) -> str:
        return f"{self.layout}-{'distributed' if self.distributed else 'plain'}"


@dataclass(frozen=True)
class Case:
    """A role that is saved in one setting after some updates, and loaded in others."""

    model: str
    """`dense`, `tied`, `experts` or `critic`."""
    dtype: str
    steps: int
    source: Setting
    targets: tuple[Setting, ...]

    def name(self, target: Setting) -> str:
        return f"{self.model}-{self.dtype}-{self.steps}-steps-{self.source}-to-{target}"


def _settings(layouts: tuple[str, ...]) -> tuple[Setting, ...]:
    """Both optimizers by turns, so that every change of layout meets one, and all changes of optimizer occur."""
    return tuple(Setting(layout, place % 2 == 0) for place, layout in enumerate(layouts))


SWITCHES = (Setting("pp2-vpp2", False), Setting("dp4", True), Setting("tp2-pp2", True), Setting("dp4", False))

CASES = (
    Case("dense", "float32", 2, Setting("tp2-pp2", True), _settings(DENSE)),
    Case("dense", "float32", 2, Setting("dp4", False), _settings(DENSE[::-1])),
    Case("dense", "bfloat16", 2, Setting("dp4", True), SWITCHES),
    Case("dense", "bfloat16", 2, Setting("pp2-vpp2", False), SWITCHES),
    Case("dense", "float32", 0, Setting("dp4", True), SWITCHES),
    Case("dense", "float32", 0, Setting("dp4", False), SWITCHES),
    Case("dense", "bfloat16", 0, Setting("tp2-pp2", True), SWITCHES),
    Case("dense", "bfloat16", 0, Setting("dp4", False), SWITCHES),
    Case("tied", "float32", 2, Setting("tp2-pp2", True), SWITCHES),
    Case("critic", "float32", 2, Setting("pp2-vpp2", True), SWITCHES),
    Case("experts", "float32", 2, Setting("ep2-dp4", True), _settings(EXPERTS)),
    Case("experts", "float32", 2, Setting("tp2-pp2-ep2", False), _settings(EXPERTS[::-1])),
    Case("experts", "bfloat16", 0, Setting("ep4", True), _settings(EXPERTS)),
)
