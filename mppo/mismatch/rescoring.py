"""The trainer's side: its actor, and the scores that it gives to trajectories, as it is or changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch.packed import unpack
from mppo.batch.trajectory import Answer, Judgement, Trajectory, TrajectoryId
from mppo.megatron import platform
from mppo.megatron.collectives import gather_from_all
from mppo.megatron.head import PolicyHead
from mppo.megatron.objectives import ForwardPass, LogProbPass
from mppo.megatron.topology import Topology
from mppo.mismatch.altered_heads import AlteredPass, LikelihoodPass, altered
from mppo.mismatch.hypotheses import Change, Head, Likelihoods
from mppo.trainer.redistribution import distribute
from mppo.trainer.roles import Role
from mppo.trainer.run_spec import RunSpec
from mppo.weights.cuts import VocabularyRows
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel
from mppo.weights.transfer_plan import Holding, Layout, Piece, Region
from mppo.weights.transports.point_to_point import PointToPoint

EMBEDDING = "model.embed_tokens.weight"
Vectors = dict[TrajectoryId, Tensor]
"""`[L]` each, in token coordinates."""


@dataclass(eq=False)
class TrainerSide:
    """What trains: everything that decides the log-probs of a token."""

    spec: RunSpec
    model: PretrainedModel
    topology: Topology
    actor: Role
    head: PolicyHead
    """Of training."""
    weights: LiveWeights

    def trained(self, mine: Sequence[Trajectory]) -> Vectors:
        """Of every rank's trajectories: what training gives to their actions; 0 elsewhere. Collective."""
        return self._scored(mine, LogProbPass(self.head))["log_probs"]

    def scored(self, mine: Sequence[Trajectory], change: Change) -> Vectors:
        """Of every rank's trajectories, at all tokens but the first, with a head of its own. Collective."""
        whole = [_all_actions(trajectory) for trajectory in mine]
        embedding = self._embedding() if change.head is Head.EMBEDDING else None
        padded = self.model.config.padded_vocab_size(self.topology.tp)
        closure = AlteredPass(self._own_head, change, padded, embedding)
        with altered(self.actor.chunks, self.model.config, change):
            return self._scored(whole, closure)["log_probs"]

    def likelihoods(self, mine: Sequence[Trajectory], temperature: float, k: int) -> dict[str, Vectors]:
        """Of every rank's trajectories, by the names of `Likelihoods`. Collective."""
        whole = [_all_actions(trajectory) for trajectory in mine]
        return self._scored(whole, LikelihoodPass(self._own_head, temperature, k))

    @property
    def _own_head(self) -> PolicyHead:
        return PolicyHead(self.model.config.vocab_size, 1.0, self.topology.tp_group, fp32_logits=True)

    def _scored(self, mine: Sequence[Trajectory], closure: ForwardPass) -> dict[str, Vectors]:
        """What the closure gives, by its names, of the trajectories of all ranks."""
        answers = [Answer(trajectory, Judgement(trajectory.uid, 0.0)) for trajectory in mine]
        batch = distribute(answers, self.spec, self.model.config, 0, self.topology)
        values = self.actor.forward(batch, self.spec.actor.infer_limit, closure)
        uids = [batch.table.summaries[index].uid for index in batch.packed.indices.tolist()]
        own = {
            name: dict(zip(uids, unpack(batch.packed, x), strict=True)) if uids else {} for name, x in values.items()
        }
        everywhere = gather_from_all(own)
        return {name: {uid: x for part in everywhere for uid, x in part[name].items()} for name in closure.names}

    def _embedding(self) -> Tensor:
        """`[V/tp, H]`: this rank's rows, as an output layer would have them."""
        model, tensors = self.model.config, self.weights.layout.tensors
        part = model.padded_vocab_size(self.topology.tp) // self.topology.tp
        shape = (part, model.hidden_size)
        holdings = {}
        for rank in range(dist.get_world_size()):
            rows = VocabularyRows().slices(model, rank % self.topology.tp, self.topology.tp)
            real = [s for s in rows if s.source == 0]
            pieces = tuple(
                Piece(Region(EMBEDDING, 0, s.start, s.stop), Region("head", 0, 0, s.stop - s.start)) for s in real
            )
            holdings[rank] = Holding({"head": shape}, pieces)
        return self._brought(Layout(tensors, holdings), "head", shape)

    def parameter(self, target: Layout, name: str) -> Tensor:
        """`<tp rank>/<parameter>` of a worker, whole, on every rank. Collective."""
        tp_rank, own = name.split("/", 1)
        worker = next(worker for worker in target.holdings if worker.tp_rank == int(tp_rank))
        holding = target.holdings[worker]
        shape = holding.shapes[own]
        pieces = tuple(piece for piece in holding.pieces if piece.own.name == own)
        everybody = {rank: Holding({own: shape}, pieces) for rank in range(dist.get_world_size())}
        return self._brought(Layout(target.tensors, everybody), own, shape).cpu()

    def _brought(self, layout: Layout, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = next(iter(layout.tensors.values())).dtype
        whole = torch.zeros(shape, dtype=dtype, device=platform.device())
        with self.actor.onloaded_weights():
            PointToPoint().run(self.weights.plan_for(layout), self.weights, {name: whole})
        return whole


def _all_actions(trajectory: Trajectory) -> Trajectory:
    """Every token that something comes before is scored."""
    everything = torch.ones(len(trajectory), dtype=torch.bool)
    everything[0] = False
    return replace(trajectory, action_mask=everything)


@dataclass(eq=False)
class Rescorer:
    """Hypotheses about a trainer; each is worked out once."""

    trainer: TrainerSide
    mine: Sequence[Trajectory]
    """This rank's share of the trajectories."""
    order: Sequence[TrajectoryId]
    """Of all trajectories in the evidence."""
    target: Layout
    """What the workers of the servers hold."""
    _scores: dict[Change, list[Tensor]] = field(default_factory=dict)

    def score(self, change: Change) -> list[Tensor]:
        """See `Hypotheses`."""
        if change not in self._scores:
            self._scores[change] = self._in_order(self.trainer.scored(self.mine, change))
        return self._scores[change]

    def likelihoods(self, temperature: float, k: int = 0) -> Likelihoods:
        """See `Hypotheses`."""
        found = self.trainer.likelihoods(self.mine, temperature, k)
        return Likelihoods(**{name: self._in_order(vectors) for name, vectors in found.items()})

    def parameter(self, name: str) -> Tensor:
        """See `Hypotheses`."""
        return self.trainer.parameter(self.target, name)

    def _in_order(self, found: Vectors) -> list[Tensor]:
        return [found[uid] for uid in self.order]
