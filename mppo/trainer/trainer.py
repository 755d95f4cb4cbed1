"""The training loop and the nine steps of one training step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from mppo.algorithm.kl import FULL, KLController
from mppo.algorithm.reward_shaping import RunningMoments
from mppo.algorithm.statistics import Statistics
from mppo.batch.trajectory import Answer
from mppo.errors import alike_on_every_rank
from mppo.megatron import platform
from mppo.megatron.collectives import (
    data_parallel_reduction,
    fail_together,
    gather_from_all,
    sum_over_ranks,
    sum_with_gradient,
)
from mppo.megatron.objectives import LogProbPass, PolicyObjective, ReferencePass, ValueObjective, ValuePass
from mppo.megatron.random_state import RandomState
from mppo.rollout.buffer import Taken
from mppo.rollout.reward_workers import check_parts
from mppo.trainer.advantage_pipeline import AdvantagePipeline
from mppo.trainer.batches import MiniBatch, StepBatch, check_budgets, cut_mini_batch
from mppo.trainer.checkpoints import Checkpoints
from mppo.trainer.current_policy_fields import CurrentPolicyFields
from mppo.trainer.guard import StepGuard
from mppo.trainer.metrics import MeanOverUpdates, throughput, trajectory_metrics
from mppo.trainer.one_ahead import OneAhead
from mppo.trainer.progress import Progress
from mppo.trainer.redistribution import balanced_mini_batches, distribute
from mppo.trainer.reporter import SampleLine
from mppo.trainer.run import Run
from mppo.trainer.run_spec import Anchor
from mppo.trainer.skipped_steps import SkippedSteps
from mppo.trainer.stateful import State, Stateful
from mppo.trainer.validation import Judged, validation_metrics
from mppo.weights.export import export_hf

T = TypeVar("T")


def named_step(method: Callable[..., T]) -> Callable[..., T]:
    """Time a step of training (`time/<name>`, seconds, all its calls) and show it to the profiler under its name."""

    @wraps(method)
    def wrapper(self: "Trainer", *args: Any) -> T:
        start = perf_counter()
        with platform.named_range(method.__name__):
            result = method(self, *args)
        name = f"time/{method.__name__}"
        self.metrics[name] = self.metrics.get(name, 0.0) + perf_counter() - start
        return result

    return wrapper


class Trainer:
    """Synchronous PPO over a `run`: the roles, the rollouts and the records, assembled from a configuration."""

    def __init__(self, run: Run):
        self.run, self.spec, self.config, self.topology = run, run.spec, run.spec.config, run.topology
        self.metrics: dict[str, float] = {}
        control = self.config.algorithm.kl_ctrl
        self.kl_controller = KLController(
            control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon
        )
        self.moments = RunningMoments()
        self.skipped = SkippedSteps(self.config.trainer.on_non_finite, self.config.trainer.max_skipped_steps)
        self.progress = Progress()
        self.reduction = data_parallel_reduction(self.topology)
        self.combine = sum_with_gradient(self.topology.cp_group) if self.topology.cp > 1 else None
        self.current_policy = CurrentPolicyFields(self.spec, run.roles.actor, run.roles.head, self.reduction)
        self.checkpoints = Checkpoints(
            Path(self.config.trainer.out_dir) / "checkpoints",
            self._states(),
            run.records.description,
            self.config.trainer.keep_checkpoints,
        )
        self._warned: set[str] = set()
        self.guard = StepGuard(run, self.settled, self.checkpoints, self.progress)

    def _states(self) -> dict[str, State]:
        """What a checkpoint consists of."""
        roles = {"actor": self.run.roles.actor, "critic": self.run.roles.critic}
        return {
            **{name: role for name, role in roles.items() if role is not None},
            "progress": self.progress,
            "records": self.run.records.reporter,
            "skipped_steps": self.skipped,
            **self.settled,
            "buffer": self.run.rollouts.buffer,
            "random": RandomState(self.topology),
        }

    @property
    def settled(self) -> dict[str, Stateful]:
        """What a refused step leaves as it was before it: the order of the data, and what it steers."""
        return {
            "prompts": self.run.rollouts.stream,
            "kl_controller": self.kl_controller,
            "reward_moments": self.moments,
        }

    def train(self) -> dict[int, float]:
        """Run to the last step; returns the accuracy on held-out prompts, by the step after which they were answered.

        When a step or a validation is refused (a reward that raises, a loss that is not finite), what was trained is
        saved first.
        """
        settings, reporter = self.config.trainer, self.run.records.reporter
        resumed = self.restore()
        reporter.start(self.progress.step)
        for line in (*self.spec.warnings, self.run.data, *resumed):
            reporter.note(line)
        self.sync_weights()
        if self.progress.step >= settings.total_training_steps and settings.save_hf:
            self.export("hf")
        if self._validation_is_due:
            self.validate()
        while self.progress.step < settings.total_training_steps:
            self.train_step()
            self.metrics |= throughput(self.metrics, gather_from_all(platform.peak_memory()))
            self.report()
            self._after_step()
        if self.metrics:
            times = (
                f"{name.removeprefix('time/')} {seconds:.2f} s"
                for name, seconds in sorted(self.metrics.items())
                if name.startswith("time/")
            )
            reporter.note(f"after the last step: {', '.join(times)}")
        reporter.finish(self.progress.accuracies)
        return self.progress.accuracies

    def _after_step(self) -> None:
        """What is written now and then. The checkpoint comes last, so that whoever resumes has all that came before."""
        settings, done = self.config.trainer, self.progress.step
        is_last = done == settings.total_training_steps
        if self._is_due(settings.save_hf_freq):
            self.export(f"hf_step_{done:06d}")
        if is_last and settings.save_hf:
            self.export("hf")
        if self._validation_is_due:
            self.validate()
        if settings.save_freq and (self._is_due(settings.save_freq) or is_last):
            self.save()

    def _is_due(self, frequency: int) -> bool:
        return frequency > 0 and self.progress.step % frequency == 0

    @property
    def _validation_is_due(self) -> bool:
        """Before the first step, after every so many, and after the last; never twice for a step."""
        step, settings = self.progress.step, self.config.trainer
        if not self.run.rollouts.held_out or step in self.progress.accuracies:
            return False
        if step == 0:
            return settings.val_before_train
        return self._is_due(settings.test_freq) or step == settings.total_training_steps

    @named_step
    def report(self) -> None:
        """A line of the log, and all metrics."""
        metrics, self.metrics = self.metrics, {}
        self.run.records.reporter.step(self.progress.step, metrics)

    @named_step
    def train_step(self) -> None:
        """One training step: nine steps, and the new weights to the engine."""
        with self.guard.refusable():
            taken = self.sample()
            if self.sleeps:
                self.run.rollouts.sleep()
            answers = self.reward(taken)
            batch = self.balance(answers)
            batch = self.old_log_probs(batch)
            batch = self.ref_log_probs(batch)
            batch = self.values(batch)
            batch = self.advantages(batch)
            self.update_critic(batch)
            if self.progress.step >= self.config.trainer.critic_warmup:
                self.update_actor(batch)
                self.sync_weights()
            elif self.sleeps:
                self.sync_weights()
        self.progress.step += 1

    @property
    def sleeps(self) -> bool:
        """Whether the engine shares the GPUs, and has lost its weights while the trainer trained."""
        return self.config.rollout.engine == "sglang" and self.config.rollout.sglang.colocated

    @named_step
    def sample(self) -> Taken:
        """Step 1: fill the buffer with answers that are judged, and take the groups of this step out of it.

        With dynamic sampling prompts are drawn until enough groups have a signal, at most `max_num_gen_batches` times.
        """
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        rollouts, draws = self.run.rollouts, 0
        while draws < (filtering.max_num_gen_batches if filtering.enable else 1) and rollouts.buffer.ready() < wanted:
            with fail_together():
                rollouts.collector.collect(rollouts.stream, rollouts.buffer)
            draws += 1
        taken = rollouts.buffer.take(wanted)
        if filtering.enable:
            self.metrics |= {
                "rollout/generation_batches": float(draws),
                "rollout/groups_without_signal": float(taken.without_signal),
                "rollout/groups_without_signal_used": float(taken.used_without_signal),
                "rollout/groups_left_over": float(taken.left_over),
            }
        return taken

    @named_step
    def reward(self, taken: Taken) -> list[Answer]:
        """Step 2: look at the judgements, which were made beside generation, and write some of the samples down."""
        rewards = self.run.rollouts.collector.rewards
        samples = [(answer, group.prompt) for group in taken.groups for answer in group.samples]
        shown = samples[: self.config.trainer.samples_per_step]
        self.run.records.reporter.samples([SampleLine.of(a, p, rewards.text) for a, p in shown])
        counts = sum_over_ranks(rewards.take_counts())
        self.metrics |= counts | {"reward/failure_rate": counts["reward/failures"] / max(counts["reward/samples"], 1)}
        with fail_together():
            for group in taken.groups:
                check_parts(group.samples, self.spec.estimator.reward_keys)
        return [answer for group in taken.groups for answer in group.answers]

    @named_step
    def balance(self, answers: list[Answer]) -> StepBatch:
        """Step 3: bring every trajectory to the data-parallel rank that trains it first, and pack."""
        with alike_on_every_rank():
            batch = distribute(answers, self.spec, self.run.model.config, self.progress.step, self.topology)
            check_budgets(batch.table, self.spec.actor.limits, self.topology)
            if self.spec.critic is not None and self.run.roles.critic is not None:
                check_budgets(batch.table, self.spec.critic.limits, self.run.roles.critic.topology)
        self.metrics |= trajectory_metrics(batch.table, self.progress.weight_version)
        return batch

    @named_step
    def old_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 4: the PPO anchor, under the weights before any update of this step; in bypass mode the rollout's."""
        anchor = self.spec.anchor(batch.table.prompt_count)
        if anchor is Anchor.ROLLOUT_POLICY:
            return batch.with_fields(old_log_probs=batch.packed["rollout_log_probs"])
        if anchor is Anchor.CURRENT_POLICY:
            return batch  # the objective takes the current log-probs, which are the same
        algorithm, names = self.config.algorithm, ["log_probs"]
        if self.spec.estimator.traits.sum_pi_squared:
            names.append("sum_pi_squared")
        if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
            names.append("hidden")
        closure = LogProbPass(self.run.roles.head, tuple(names))
        output = self.run.roles.actor.forward(batch, self.spec.actor.infer_limit, closure)
        return batch.with_fields(
            old_log_probs=output["log_probs"],
            sum_pi_squared=output.get("sum_pi_squared"),
            old_hidden=output.get("hidden"),
        )

    @named_step
    def ref_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 5: the frozen reference, where either KL path is on."""
        roles, actor, algorithm = self.run.roles, self.config.actor, self.config.algorithm
        if roles.reference is None:
            return batch
        names, weight = ["log_probs"], None
        if actor.use_kl_loss and actor.kl_loss_type == FULL:
            names.append("hidden")
        if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
            names.append("full_kl")
            weight = roles.actor.output_weight()
        closure = ReferencePass(roles.head, tuple(names), weight)
        output = roles.reference.forward(batch, self.spec.actor.infer_limit, closure)
        return batch.with_fields(
            ref_log_probs=output["log_probs"],
            ref_hidden=output.get("hidden"),
            full_kl=output.get("full_kl"),
            old_hidden=None,
        )

    @named_step
    def values(self, batch: StepBatch) -> StepBatch:
        """Step 6: the critic's predictions, where the estimator needs them."""
        critic, settings = self.run.roles.critic, self.spec.critic
        if critic is None or settings is None:
            return batch
        return batch.with_fields(values=critic.forward(batch, settings.infer_limit, ValuePass())["values"])

    @named_step
    def advantages(self, batch: StepBatch) -> StepBatch:
        """Step 7: correct for the rollout's policy, shape the rewards, then estimate advantages and returns."""
        pipeline = AdvantagePipeline(self.spec, self.reduction, self.kl_controller, self.moments, self.metrics)
        batch = pipeline(batch)
        self._warn_of_groups_of_one()
        return batch

    def _warn_of_groups_of_one(self) -> None:
        count = int(self.metrics.get("advantage/groups_of_one", 0))
        if count and "groups of one" not in self._warned and self.config.rollout.n > 1:
            self._warned.add("groups of one")
            self.run.records.reporter.note(
                f"warning: {count} groups are left with one answer that trains; its advantage is its raw score"
                " (advantage/groups_of_one counts them)"
            )

    @named_step
    def update_critic(self, batch: StepBatch) -> None:
        """Step 8: epochs of mini-batches on the critic, where there is one."""
        critic, settings = self.run.roles.critic, self.spec.critic
        if critic is None or settings is None:
            return
        mean, cliprange = MeanOverUpdates("critic/"), self.config.critic.cliprange_value
        seed, reads = self.config.trainer.seed, ValueObjective.reads
        steps = balanced_mini_batches(batch.only(reads), settings, seed, critic.topology)
        mini_batches = OneAhead(cut_mini_batch(b, i, settings, critic.topology, reads) for b, i in steps)
        with critic.onloaded():
            for mini_batch in mini_batches:
                objective = ValueObjective(cliprange, mini_batch.total_tokens)
                update = partial(critic.update, mini_batch, objective, mini_batches.fetch)
                mean.add(self.skipped.attempt(update))
        self.metrics |= mean.metrics()

    @named_step
    def update_actor(self, batch: StepBatch) -> None:
        """Step 9: epochs of mini-batches on the actor."""
        roles, terms = self.run.roles, self.spec.terms
        mean, reference_weight = MeanOverUpdates("actor/"), None
        if terms.uses_full_kl and roles.reference is not None:
            reference_weight = roles.reference.output_weight()
        mini_batches = OneAhead(self._actor_mini_batches(batch))
        meanwhile = [] if self.current_policy.is_needed else [mini_batches.fetch]
        with roles.actor.onloaded(), self._counted(mean):
            for mini_batch, summary in mini_batches:
                tokens = mini_batch.total_tokens
                objective = PolicyObjective(roles.head, terms, tokens, reference_weight, self.combine)
                update = partial(roles.actor.update, mini_batch, objective, *meanwhile)
                mean.add(self.skipped.attempt(update), summary)
        self.metrics |= mean.metrics()
        if terms.kl_loss_coef is not None:
            self.metrics["actor/kl_coef"] = terms.kl_loss_coef

    def _actor_mini_batches(self, batch: StepBatch) -> Iterator[tuple[MiniBatch, Statistics]]:
        """Each with what was known of it before its training pass."""
        settings, reads = self.spec.actor, PolicyObjective.reads(self.spec.terms)
        steps = balanced_mini_batches(batch, settings, self.config.trainer.seed, self.topology)
        for number, (balanced, indices) in enumerate(steps):
            prepared, summary = self.current_policy.add(balanced, indices, number)
            yield cut_mini_batch(prepared, indices, settings, self.topology, reads), summary

    @contextmanager
    def _counted(self, over_updates: MeanOverUpdates) -> Iterator[None]:
        """However what is inside ends: if it updated the actor, its weights have a new version."""
        try:
            yield
        finally:
            self.progress.weight_version += bool(over_updates.count)

    @named_step
    def sync_weights(self) -> None:
        """Give the engine the actor's weights, and where roles rest on the host and it is another process, the GPU's
        memory."""
        with self.run.roles.actor.onloaded_weights():
            self.metrics |= self.run.rollouts.update_weights(self.progress.weight_version)
        if self.config.rollout.engine != "local" and self.config.actor.placement == "host":
            platform.return_cached_memory()

    def restore(self) -> list[str]:
        """Go on from the newest checkpoint, if there is one; returns what to say of it and of what differs."""
        if not self.config.trainer.resume:
            return []
        resumed = self.checkpoints.resume(allow_changes=self.config.trainer.resume_changed)
        return [*resumed.lines(), *self.run.rollouts.notes()] if resumed else []

    @named_step
    def save(self) -> None:
        """A checkpoint of everything that has state."""
        progress = self.progress
        self.checkpoints.save(progress.step, progress.weight_version, progress.accuracy)

    @named_step
    def export(self, name: str) -> None:
        """The actor as a Hugging Face folder of that name."""
        with self.run.roles.actor.onloaded_weights():
            export_hf(self.run.rollouts.weights, self.run.model, f"{self.config.trainer.out_dir}/{name}")

    @named_step
    def validate(self) -> None:
        """Answer the held-out prompts, and remember and report how many are right."""
        held_out, collector = self.run.rollouts.held_out, self.run.rollouts.collector
        with self.guard.refusable(), fail_together():
            answers = collector.validate(held_out)
        collector.rewards.take_counts()  # which are those of training steps
        mine = [Judged.of(answer) for answer in answers]
        metrics = validation_metrics(judged for part in gather_from_all(mine) for judged in part)
        self.progress.accuracies[self.progress.step] = metrics["val/accuracy"]
        self.run.records.reporter.validation(self.progress.step, metrics)
