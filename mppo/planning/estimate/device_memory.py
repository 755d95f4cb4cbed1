"""Actor, critic and reference on one device: what each holds while it works, and while another does."""

from dataclasses import dataclass

from mppo.config import TrainedRoleConfig
from mppo.megatron.model_config import ModelConfig
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

    @property
    def highest(self) -> int:
        """Without the activations of forward-only passes, which are smaller than those of updates."""
        return max(self.actor_update, self.critic_update)


def on_device(spec: RunSpec, model: ModelConfig, critic: ModelConfig | None, mix: Mix) -> list[OnDevice]:
    """Of each pipeline stage that differs from others by the actor's layout.

    Raises DataError that names a trajectory over the token budget of a micro-batch.
    """
    layout = actor_layout(spec)
    lengths, answers = mix.step(spec.trajectories), spec.config.rollout.n
    load = load_of(lengths, spec.actor, model, layout.sizes, answers)
    terms = HeadTerms(spec.terms.entropy_coeff != 0, spec.terms.uses_full_kl)
    of_critic = None
    if critic is not None and spec.critic is not None:
        critics = _critic_layout(spec)
        of_critic = critic, critics, load_of(lengths, spec.critic, critic, critics.sizes, answers)
    found = []
    for stage in layout.stages(model):
        actor = held_by(model, layout, load, stage, terms)
        own = None if of_critic is None else held_by(*of_critic, stage, HeadTerms())
        reference = stage_weights(model, layout, stage).total * layout.bytes_per_weight
        found.append(_together(spec, stage, actor, own, reference * spec.config.need_reference))
    return found


def actor_layout(spec: RunSpec) -> Layout:
    config = spec.config
    return Layout.of(
        config.parallel, spec.data_parallel_size, config.model.dtype, config.actor.optim, config.model.recompute
    )


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
