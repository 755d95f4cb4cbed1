"""Loading Hugging Face tensors into Megatron model chunks of any layout."""

import torch

from mppo.errors import ModelError
from mppo.megatron.model_config import ModelConfig
from mppo.megatron.topology import Topology
from mppo.weights.architectures import VALUE_HEAD, Architecture, Parameter
from mppo.weights.live_weights import LocalParameter, local_parameters
from mppo.weights.shards import hf_tensors, make_up
from mppo.weights.sources import TensorSource


@torch.no_grad()
def load(
    chunks: list[torch.nn.Module],
    architecture: Architecture,
    model: ModelConfig,
    source: TensorSource,
    topology: Topology,
    *,
    value_head: bool = False,
    zero_value_head: bool = True,
) -> None:
    """Fill this rank's chunks from `source`, reading only the slices they hold.

    Raises ModelError, on every rank alike, for a tensor that is missing, of another size than config.json says, or in
    `source` but not in the table: nothing of a model is silently left out.
    """
    _check_tensors(_rows_of_folder(architecture, model, value_head, zero_value_head), architecture, model, source)
    if model.tie_word_embeddings and not value_head and "lm_head.weight" in source:
        _check_head_is_tied(model, source)
    for parameter in local_parameters(chunks, architecture, value_head):
        if parameter.table == VALUE_HEAD and zero_value_head:
            parameter.tensor.zero_()
        else:
            _fill(parameter, model, source, topology)


def _fill(parameter: LocalParameter, model: ModelConfig, source: TensorSource, topology: Topology) -> None:
    row, own = parameter.table, {parameter.name: parameter.tensor}
    rank, ranks = (topology.etp_rank, topology.etp) if row.per_expert else (topology.tp_rank, topology.tp)
    made = make_up(row, row.cut.slices(model, rank, ranks), parameter.layer, parameter.expert)
    for piece in made.pieces:
        piece.own.view(own).copy_(source.read(piece.hf.name, piece.hf.dim, piece.hf.start, piece.hf.stop))
    for region in made.padding:
        region.view(own).zero_()


def _rows_of_folder(
    architecture: Architecture, model: ModelConfig, value_head: bool, zero_value_head: bool
) -> tuple[Parameter, ...]:
    """Without a head where it is the embedding, or starts at zero."""
    has_own_head = not zero_value_head if value_head else not model.tie_word_embeddings
    return architecture.rows(model, value_head) if has_own_head else architecture.parameters


def _check_tensors(rows: tuple[Parameter, ...], architecture: Architecture, model: ModelConfig, source: TensorSource):
    """Every tensor is there, exactly as large as asked for, and none is left over; on every rank, whatever it holds."""
    asked = hf_tensors(rows, model, torch.float32)
    for name, tensor in asked.items():
        if (found := source.shape(name)) != tensor.shape:
            raise ModelError(
                f"{name} is {list(found)}, config.json asks for {list(tensor.shape)}; does it belong to these weights?"
            )
    known = {*asked, "lm_head.weight", "score.weight"}
    unknown = sorted(n for n in source.names() if n not in known and not n.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ModelError(
            f"the model has tensors that the table of {architecture.hf_name} does not know, {unknown[0]} the first"
            f" of {len(unknown)}; a feature of it would be lost"
        )


def _check_head_is_tied(model: ModelConfig, source: TensorSource) -> None:
    """A folder may hold the output layer beside the embedding that it is."""
    embedding, head = (source.read(n, 0, 0, model.vocab_size) for n in ("model.embed_tokens.weight", "lm_head.weight"))
    if not torch.equal(embedding, head):
        raise ModelError(
            "config.json says tie_word_embeddings, but lm_head.weight is another tensor than the embedding; set that"
            " to false, or leave lm_head.weight out"
        )
