"""Memory and communication of one rank, on paper: what a layout asks of a model and a mix of lengths."""

from dataclasses import dataclass

from mppo.config import DataConfig
from mppo.errors import ConfigError
from mppo.megatron.model_config import ModelConfig
from mppo.planning.estimate.communication import Sent, sent_by
from mppo.planning.estimate.lengths import Length, Load, Mix, Sample, Spread, check_length, load_of
from mppo.planning.estimate.memory import HeadTerms, Memory, held_by
from mppo.planning.estimate.stage_layout import Layout
from mppo.trainer.run_spec import RunSpec


@dataclass(frozen=True)
class StageEstimate:
    """Of one rank of a pipeline stage."""

    stage: int
    layers: int
    held: Memory
    sent: Sent
    """In one optimizer step."""


@dataclass(frozen=True)
class Estimate:
    """Of the worst rank of each pipeline stage that differs from others (see `Layout.stages`)."""

    load: Load
    stages: list[StageEstimate]


def estimate(model: ModelConfig, layout: Layout, load: Load, terms: HeadTerms) -> Estimate:
    """Of one optimizer step."""
    stages = [
        StageEstimate(
            stage,
            layout.layers(model, stage),
            held_by(model, layout, load, stage, terms),
            sent_by(model, layout, load, stage, terms.policies),
        )
        for stage in layout.stages(model)
    ]
    return Estimate(load, stages)


def estimate_actor(spec: RunSpec, model: ModelConfig, mix: Mix) -> Estimate:
    """Of the actor's update. Raises DataError that names a trajectory over the token budget of a micro-batch."""
    config, terms = spec.config, spec.terms
    layout = actor_layout(spec)
    load = load_of(mix.step(spec.trajectories), spec.actor, model, layout.sizes, config.rollout.n)
    return estimate(model, layout, load, HeadTerms(terms.entropy_coeff != 0, terms.uses_full_kl))


def actor_layout(spec: RunSpec) -> Layout:
    config = spec.config
    return Layout.of(
        config.parallel, spec.data_parallel_size, config.model.dtype, config.actor.optim, config.model.recompute
    )


def mix_of(data: DataConfig, path: str | None, prompt: int | None, response: int | None, sigma: float | None) -> Mix:
    """From the options of the command; the maxima where no length is given.

    Raises ConfigError for a length that cannot be, and for an option that would have no effect.
    """
    given = {"--prompt-tokens": prompt, "--response-tokens": response, "--response-sigma": sigma}
    if path is None:
        spread = Spread(
            prompt=data.max_prompt_length if prompt is None else prompt,
            response=data.max_response_length if response is None else response,
            longest=data.max_response_length,
            sigma=sigma or 0.0,
        )
        check_length(Length(spread.prompt, spread.response), data, "--prompt-tokens, --response-tokens")
        return spread
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} has no effect with --lengths, which gives every length; leave one of them out")
    return Sample.read(path, data)
