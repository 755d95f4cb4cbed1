"""What a Trainer works with: roles, rollouts and records of one run."""

from dataclasses import dataclass

from mppo.megatron.head import PolicyHead
from mppo.megatron.topology import Topology
from mppo.rollout.buffer import Buffer
from mppo.rollout.collector import Collector
from mppo.rollout.prompts import Prompt, PromptStream
from mppo.trainer.manifest import RunDescription
from mppo.trainer.reporter import SilentReporter
from mppo.trainer.roles import ReferenceRole, TrainableRole
from mppo.trainer.run_lock import RunLock
from mppo.trainer.run_spec import RunSpec
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel


@dataclass(frozen=True)
class Roles:
    """The models, and how the actor's hidden states become probabilities."""

    actor: TrainableRole
    critic: TrainableRole | None
    reference: ReferenceRole | None
    head: PolicyHead


@dataclass(frozen=True)
class Rollouts:
    """Where trajectories come from."""

    collector: Collector
    stream: PromptStream
    """The prompts to train on, in the order of the run."""
    buffer: Buffer
    held_out: dict[int, Prompt]
    """Prompts of validation; none where there is no validation."""
    weights: LiveWeights
    """The actor's."""

    def notes(self) -> list[str]:
        """What to say of prompts that a run goes on with and that are not those it began with."""
        dropped = self.buffer.dropped
        lost = f"{dropped} groups of answers that waited are left out: their prompts are not known any more"
        return [note for note in (self.stream.note, lost if dropped else None) if note]

    def update_weights(self, version: int) -> dict[str, float]:
        """Give the engine the actor's weights under this version; returns what to report of it. Collective."""
        collector = self.collector
        return collector.loop.run(collector.engine.update_weights(self.weights, version))

    def sleep(self) -> None:
        """No answer is wanted until the next update of weights. Collective."""
        self.collector.loop.run(self.collector.engine.sleep())


@dataclass(frozen=True)
class Records:
    """What a run leaves behind."""

    reporter: SilentReporter
    description: RunDescription
    """What checkpoints are marked with."""
    lock: RunLock | None
    """Of the run's folder, on the first rank."""


@dataclass(frozen=True)
class Run:
    spec: RunSpec
    topology: Topology
    model: PretrainedModel
    roles: Roles
    rollouts: Rollouts
    records: Records
    data: str
    """What was read, in words."""
