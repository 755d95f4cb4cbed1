"""What is varied: layouts, losses, aggregation modes and cuts into micro-batches."""

from dataclasses import asdict, dataclass
from itertools import product

from mppo.algorithm.aggregation import AGGREGATIONS
from mppo.algorithm.policy_losses import POLICY_LOSSES
from mppo.batch.batch_plan import MicroBatchLimit
from mppo.config import ParallelConfig

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
LAYOUTS = {
    2: ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "dp2", "ep2-dp2", "tp2-sp-ep2", "cp2-ep2"),
    4: (
        "pp4",
        "cp4",
        "tp2-sp-pp2",
        "tp2-sp-cp2",
        "tp2-dp2",
        "pp2-vpp2-cp2",
        "pp2-vpp2-dp2",
        "cp2-dp2",
        "dp4",
        "pp2-ep2-dp2",
    ),
    8: ("tp2-sp-pp2-cp2", "tp2-sp-pp2-vpp2-dp2", "pp2-cp2-dp2", "tp2-cp2-dp2", "pp4-dp2"),
}
"""By number of processes. What the name leaves of them is data parallel; experts are spread over the ranks that the
others make. Layouts with expert parallelism are measured on a mixture of experts, the others on a dense model."""


def parallel_config(layout: str) -> ParallelConfig:
    """`tp2-sp-pp2` -> TP 2, PP 2, sequence parallel."""
    sizes: dict[str, int | bool] = {}
    for part in layout.split("-"):
        name, size = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if name == "sp":
            sizes["sequence_parallel"] = True
        elif name != "dp":
            sizes[SHORT[name]] = int(size)
    return ParallelConfig(**sizes)


def known_layouts() -> list[str]:
    return [name for names in LAYOUTS.values() for name in names]


def processes_of(layout: str) -> int:
    """Raises KeyError for a layout that is not in the table."""
    return {name: count for count, names in LAYOUTS.items() for name in names}[layout]


CUTS = {
    "one": MicroBatchLimit(trajectories=100),
    "many": MicroBatchLimit(trajectories=1),
    "uneven": MicroBatchLimit(tokens=16),
    "idle": MicroBatchLimit(trajectories=2),
}
"""One micro-batch for each rank; one for each trajectory; uneven by tokens; and with `idle`, micro-batches, or a
whole data-parallel rank, with nothing to train."""

FOLDERS = {"actor": "llama", "critic": "reward", "actor-moe": "qwen3-moe", "critic-moe": "reward-qwen3-moe"}
"""Model folders of tests/distributed/model_folders.py."""

CRITIC = "value"
"""The name of the critic's loss."""
KNOBS = {
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": -0.2, "clip_cov_ub": 0.5},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "bypass_mode": {"loss_type": "reinforce"},
}
LOSSES = (*POLICY_LOSSES.names(), CRITIC)
MODES = tuple(AGGREGATIONS.names())


@dataclass(frozen=True)
class Case:
    layout: str
    loss: str
    mode: str
    cut: str

    @property
    def name(self) -> str:
        return "/".join(asdict(self).values())

    @property
    def model(self) -> str:
        """Actor or critic, dense or a mixture of experts."""
        critic, experts = self.loss == CRITIC, "ep" in self.layout
        return f"{'critic' if critic else 'actor'}{'-moe' if experts else ''}"

    @property
    def truth(self) -> str:
        """What it is compared with: the cut does not enter, nor does the layout."""
        return f"{self.model}/{self.loss}/{self.mode}"


def all_cases(layouts, losses, modes, cuts) -> list[Case]:
    """Every combination."""
    return [Case(*combination) for combination in product(layouts, losses, modes, cuts)]


def covering_cases(layouts, losses, modes, cuts) -> list[Case]:
    """Each layout with each loss, and over the layouts every loss with every mode and every cut."""
    cases = []
    for place, layout in enumerate(layouts):
        for number, loss in enumerate(losses):
            mode, cut = modes[(place + number) % len(modes)], cuts[(place + 2 * number) % len(cuts)]
            cases.append(Case(layout, loss, mode, cut))
    return cases
