"""What travels between pipeline stages: shapes that every stage knows beforehand, so that none waits for them."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

Shape = list[int]


class StageLinks(P2PCommunicator):
    """Megatron's communication between stages, without its exchange of shapes before each tensor.

    That exchange ends in the host reading a shape back from its GPU, for every micro-batch and direction. But all
    stages of a replica cut the same micro-batches, and Megatron's schedules are tables, so the order in which they
    come is known.
    """

    def __init__(self, config: TransformerConfig, lengths: Sequence[int]):
        """`lengths[i]` are the rows of micro-batch i on a context-parallel rank."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        forward, backward = arrivals(
            len(lengths),
            self.pp_group.rank(),
            self.pp_group.size(),
            config.virtual_pipeline_model_parallel_size or 1,
            config.microbatch_group_size_per_vp_stage or self.pp_group.size(),
        )
        cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[length // cut, 1, config.hidden_size] for length in lengths]
        self._forward, self._backward = (iter([shapes[i] for i in order]) for order in (forward, backward))

    def _communicate_shapes(self, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple:
        """In the place of Megatron's: the shapes of what comes from the previous and from the next stage."""
        return _next(self._forward, recv_prev), _next(self._backward, recv_next)


def _next(shapes: Iterator[Shape], comes: bool) -> Shape:
    return next(shapes) if comes else [0, 0, 0]


def arrivals(micro_batches: int, stage: int, stages: int, chunks: int, group: int) -> tuple[list[int], list[int]]:
    """The micro-batches whose activations come to a stage from the previous one, and those whose gradients come from
    the next one, each in order.

    Of `chunks` model chunks a stage, the first of the first stage gets no activations and the last of the last stage
    no gradients. `group` micro-batches go through a chunk before the next chunk's turn.
    """
    table = get_schedule_table(micro_batches, chunks, group)
    forward = [i for i, chunk in table if stage > 0 or chunk > 0]
    backward = [i for i, chunk in table if stage < stages - 1 or chunk > 0]  # its chunks run from the last to the first
    return forward, backward


def process_groups() -> ProcessGroupCollection:
    """Those that a schedule asks for together with its communication; the same that it takes by itself."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return groups
