"""Actor, critic and reference on one device: what each holds while it works, and while another does."""

from dataclasses import dataclass

from mppo.config import TrainedRoleConfig
from mppo.megatron.model_config import ModelConfig
from mppo.planning.estimate import Estimate, actor_layout
from mppo.planning.estimate.lengths import Mix, load_of
from mppo.planning.estimate.memory import HeadTerms, Memory, held_by
from mppo.planning.estimate.stage_layout import Layout, stage_weights
from mppo.trainer.run_spec import RunSpec


@dataclass(frozen=True)
class OnDevice:
    """Bytes on a rank of a pipeline stage."""

    stage: int
    actor: Memory
    """While it is updated."""
    critic: Memory | None
    """While it is updated; None where there is none."""
    reference: int
    """Its weights; 0 where there is none."""
    actor_update: int
    """On the device in all, while the actor is updated."""
    critic_update: int
    """The same of the critic; 0 where there is none."""


def on_device(
    spec: RunSpec, model: ModelConfig, critic: ModelConfig | None, actor: Estimate, mix: Mix
) -> list[OnDevice]:
    """Of each pipeline stage that the estimate of the actor has.

    Raises DataError that names a trajectory over the token budget of a micro-batch of the critic.
    """
    layout, of_critic = actor_layout(spec), None
    if critic is not None and spec.critic is not None:
        critics, lengths = _critic_layout(spec), mix.step(spec.trajectories)
        of_critic = critic, critics, load_of(lengths, spec.critic, critic, critics.sizes, spec.config.rollout.n)
    found = []
    for stage in actor.stages:
        own = None if of_critic is None else held_by(*of_critic, stage.stage, HeadTerms())
        reference = stage_weights(model, layout, stage.stage).total * layout.bytes_per_weight
        found.append(_together(spec, stage.stage, stage.held, own, reference * spec.config.need_reference))
    return found


def _critic_layout(spec: RunSpec) -> Layout:
    config, critic = spec.config, spec.config.critic
    assert spec.critic_parallel is not None
    return Layout.of(
        spec.critic_parallel,
        spec.data_parallel_size,
        critic.dtype or config.model.dtype,
        critic.optim,
        critic.recompute or config.model.recompute,
        value_head=True,
    )


def _together(spec: RunSpec, stage: int, actor: Memory, critic: Memory | None, reference: int) -> OnDevice:
    config = spec.config
    resident = reference if config.ref.placement == "device" else 0
    beside_actor = resident + (0 if critic is None else _at_rest(config.critic, critic))
    beside_critic = resident + _at_rest(config.actor, actor)
    return OnDevice(
        stage=stage,
        actor=actor,
        critic=critic,
        reference=reference,
        actor_update=actor.total + beside_actor,
        critic_update=0 if critic is None else critic.total + beside_critic,
    )


def _at_rest(role: TrainedRoleConfig, held: Memory) -> int:
    """What stays on the device while another role works."""
    if role.placement == "host":
        return 0
    return held.weights + held.gradients + (0 if role.optim.state_placement == "host" else held.optimizer)
