"""The training loop and the nine steps of one training step."""

from collections.abc import Callable
from functools import wraps
from time import perf_counter

import torch

from mppo.algorithm.advantages.groups import groups_of_one
from mppo.algorithm.diagnostics import explained_variance
from mppo.algorithm.group_selection import select_groups
from mppo.algorithm.kl import FULL, KLController, kl_penalty
from mppo.algorithm.reward_shaping import (
    RunningMoments,
    add_at_last_action,
    shape_outcomes,
    shaping_metrics,
    without_trajectories,
)
from mppo.algorithm.rollout_correction import CorrectionInputs, correct
from mppo.algorithm.statistics import mean, numbers, reduced
from mppo.batch.trajectory import Trajectory
from mppo.errors import DataError, RewardError
from mppo.megatron import platform
from mppo.megatron.collectives import data_parallel_reduction, fail_together, gather_from_all, sum_with_gradient
from mppo.megatron.objectives import LogProbPass, PolicyObjective, ReferencePass, ValueObjective, ValuePass
from mppo.rollout.engines.contract import Request, SamplingParams
from mppo.rollout.rewards import check_parts, score
from mppo.trainer.assemble import Parts
from mppo.trainer.batches import StepBatch, balance, check_budgets, cut_mini_batch
from mppo.trainer.collecting import greedy_rewards, values_of_groups
from mppo.trainer.metrics import MeanOverUpdates, batch_statistics, trajectory_metrics
from mppo.trainer.preparation import CurrentPolicyFields, advantage_inputs
from mppo.trainer.redistribution import balanced_mini_batches
from mppo.trainer.replay import ReplayBuffer, Rollout
from mppo.trainer.reporter import SampleLine
from mppo.trainer.shaping import outcome_shaping
from mppo.weights.transfer import save_hf


def named_step(method: Callable) -> Callable:
    """Time a step of training (`time/<name>`, seconds, all its calls) and show it to the profiler under its name."""

    @wraps(method)
    def wrapper(self, *args):
        start = perf_counter()
        with platform.named_range(method.__name__):
            result = method(self, *args)
        name = f"time/{method.__name__}"
        self.metrics[name] = self.metrics.get(name, 0.0) + perf_counter() - start
        return result

    return wrapper


class Trainer:
    """Synchronous PPO. `parts` are the roles, the engine and the data, assembled from a configuration."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.config, self.spec, self.topology = parts.config, parts.spec, parts.topology
        self.buffer = ReplayBuffer()
        self.metrics: dict[str, float] = {}
        control = self.config.algorithm.kl_ctrl
        self.kl_controller = KLController(
            control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon
        )
        self.reduction = data_parallel_reduction(self.topology)
        self.combine = sum_with_gradient(self.topology.cp_group) if self.topology.cp > 1 else None
        self.moments = RunningMoments()
        self.batches_drawn = 0
        """Batches of prompts that the run has asked for; with dynamic sampling a step may ask for several."""
        self.current_policy_fields = CurrentPolicyFields(self.spec, parts.actor, parts.head, self.reduction)
        self._warned: set[str] = set()

    def train(self) -> dict[str, float]:
        """Run to the last step; returns the accuracy on held-out prompts before and after (`before`, `after`).

        When a step is refused before its updates (a reward that raises, say), what was trained is saved first.
        """
        trainer, reporter = self.config.trainer, self.parts.reporter
        first, total = self.parts.checkpoints.restore(self), trainer.total_training_steps
        reporter.start(first)
        self.sync_weights(first)
        accuracies = {}
        if self.parts.val_prompts and trainer.val_before_train:
            accuracies["before"] = self.validate(first)
        for step in range(first, total):
            drawn = self.batches_drawn
            try:
                self.train_step(step)
            except (DataError, RewardError):
                self.batches_drawn = drawn  # so that the step, resumed, draws its prompts again
                self.parts.checkpoints.save(self, step)
                reporter.close()
                raise
            done = step + 1
            reporter.step(done, self.metrics)
            if trainer.save_freq and (done == total or self._due(trainer.save_freq, done)):
                self.parts.checkpoints.save(self, done)
            if self.parts.val_prompts and (done == total or self._due(trainer.test_freq, done)):
                accuracies["after"] = self.validate(done)
        if trainer.save_hf:
            model = self.parts.model
            with self.parts.actor.awake():
                save_hf(self.parts.exporter, model.hf_config, model.tokenizer, f"{trainer.out_dir}/hf")
        reporter.finish(accuracies)
        return accuracies

    @staticmethod
    def _due(frequency: int, step: int) -> bool:
        return frequency > 0 and step % frequency == 0

    @named_step
    def train_step(self, step: int) -> None:
        """One training step: rollout, nine steps, and the new weights to the engine."""
        self.metrics = {}
        rollout = self.collect(step)
        batch = self.balance(rollout, step)
        batch = self.old_log_probs(batch)
        batch = self.ref_log_probs(batch)
        batch = self.values(batch)
        batch = self.advantages(batch)
        self.update_critic(batch)
        if step >= self.config.trainer.critic_warmup:
            self.update_actor(batch)

        self.sync_weights(step + 1)

    def collect(self, step: int) -> Rollout:
        """Fill the replay buffer, then steps 1 and 2; with dynamic sampling again, until enough groups have signal."""
        filtering, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        collected = Rollout([], {})
        for attempt in range(filtering.max_num_gen_batches if filtering.enable else 1):
            with fail_together():
                self.rollout(step, attempt)

                rollout = self.sample()
                self.reward(rollout)
            collected = collected + rollout
            if filtering.enable:
                selection = select_groups(values_of_groups(collected, filtering.metric), wanted)
                self.metrics |= selection.metrics(attempt + 1)
                if not selection.used_without_signal:
                    break
        return collected.of_groups(set(selection.chosen)) if filtering.enable else collected

    @named_step
    def rollout(self, step: int, attempt: int) -> None:
        """Answer this rank's share of a batch of prompts into the replay buffer."""
        data, n, seed = self.config.data, self.config.rollout.n, self.config.trainer.seed
        drawn = self.parts.train_prompts.draw(self.batches_drawn, data.train_batch_size, seed if data.shuffle else None)
        self.batches_drawn += 1
        prompts = dict(enumerate(drawn, start=attempt * data.train_batch_size))
        requests = [
            Request(group * n + sample, group, prompt.ids, (seed, step, group, sample))
            for group, prompt in prompts.items()
            for sample in range(n)
        ]
        trajectories = self._generate(requests, self.parts.sampling)
        greedy = []
        if self.spec.estimator.traits.greedy_baseline:
            requests = [Request(group, group, prompt.ids, (seed, step, group)) for group, prompt in prompts.items()]
            greedy = self._generate(requests, self.parts.greedy)
        self.buffer.add(Rollout(trajectories, prompts, greedy))

    def _generate(self, requests: list[Request], sampling: SamplingParams) -> list[Trajectory]:
        """This rank's share of the answers."""
        trajectories = self.parts.engine.generate(self._share(requests), sampling)
        for trajectory in trajectories:
            trajectory.validate(self.parts.model.config.vocab_size)
        return trajectories

    def _share(self, requests: list[Request]) -> list[Request]:
        return requests[self.topology.rank :: torch.distributed.get_world_size()]

    @named_step
    def sample(self) -> Rollout:
        """Step 1: take the oldest rollout from the replay buffer."""
        return self.buffer.sample()

    @named_step
    def reward(self, rollout: Rollout) -> None:
        """Step 2: give every trajectory its reward and accuracy. Samples are written even if it fails."""
        tokenizer, shown = self.parts.model.tokenizer, rollout.trajectories[: self.config.trainer.samples_per_step]
        try:
            score(self.spec.reward, rollout.trajectories + rollout.greedy, rollout.prompts, tokenizer)
            check_parts(rollout.trajectories, self.spec.estimator.reward_keys)
        finally:
            self.parts.reporter.samples([SampleLine.of(t, rollout.prompts[t.group], tokenizer) for t in shown])

    @named_step
    def balance(self, rollout: Rollout, step: int) -> StepBatch:
        """Step 3: bring every trajectory to the data-parallel rank that trains it first, and pack."""
        baselines = greedy_rewards(rollout) if self.spec.estimator.traits.greedy_baseline else None
        model, seed = self.parts.model.config, self.config.trainer.seed
        batch = balance(rollout.trajectories, self.spec.actor, model, step, seed, self.topology, baselines)
        check_budgets(batch.table, self.spec.actor.limits, self.topology)
        if self.parts.critic is not None:
            check_budgets(batch.table, self.spec.critic.limits, self.parts.critic.topology)
        self.metrics |= trajectory_metrics(batch.table)
        return batch

    @named_step
    def old_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 4: the PPO anchor, under the weights before any update of this step; in bypass mode the rollout's."""
        if self.spec.correction.bypass_mode:
            return batch.with_fields(old_log_probs=batch.packed.rollout_log_probs)
        if self.spec.anchor_is_current:
            return batch  # the objective takes the current log-probs, which are the same
        algorithm, names = self.config.algorithm, ["log_probs"]
        if self.spec.estimator.traits.sum_pi_squared:
            names.append("sum_pi_squared")
        if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
            names.append("hidden")
        closure = LogProbPass(self.parts.head, tuple(names))
        output = self.parts.actor.forward(batch, self.spec.actor.infer_limit, closure)
        return batch.with_fields(
            old_log_probs=output["log_probs"],
            sum_pi_squared=output.get("sum_pi_squared"),
            old_hidden=output.get("hidden"),
        )

    @named_step
    def ref_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 5: the frozen reference, where either KL path is on."""
        if self.parts.reference is None:
            return batch
        actor, algorithm = self.config.actor, self.config.algorithm
        names, weight = ["log_probs"], None
        if actor.use_kl_loss and actor.kl_loss_type == FULL:
            names.append("hidden")
        if algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL:
            names.append("full_kl")
            weight = self.parts.actor.output_weight()
        closure = ReferencePass(self.parts.head, tuple(names), weight)
        output = self.parts.reference.forward(batch, self.spec.actor.infer_limit, closure)
        return batch.with_fields(
            ref_log_probs=output["log_probs"],
            ref_hidden=output.get("hidden"),
            full_kl=output.get("full_kl"),
            old_hidden=None,
        )

    @named_step
    def values(self, batch: StepBatch) -> StepBatch:
        """Step 6: the critic's predictions, where the estimator needs them."""
        if self.parts.critic is None:
            return batch
        output = self.parts.critic.forward(batch, self.spec.critic.infer_limit, ValuePass())
        return batch.with_fields(values=output["values"])

    @named_step
    def advantages(self, batch: StepBatch) -> StepBatch:
        """Step 7: correct for the rollout's policy, shape the rewards, then estimate advantages and returns."""
        batch = self._correct(batch)
        batch = self._shape(batch)
        if self.config.algorithm.use_kl_in_reward:
            batch = self._penalise(batch)
        inputs = advantage_inputs(batch, self.reduction)
        result = self.spec.estimator(inputs)
        with fail_together():
            self.spec.estimator.check_finite(result, inputs)
        batch = batch.with_fields(advantages=result.advantages, returns=result.returns)
        self.metrics |= numbers(reduced(batch_statistics(batch.packed), self.reduction))
        if self.spec.estimator.traits.groups:
            self._count_groups_of_one(groups_of_one(inputs))
        if self.parts.critic is not None:
            self.metrics["critic/explained_variance"] = explained_variance(
                batch.packed.values, result.returns, batch.packed.loss_mask, self.reduction
            )
        return batch

    def _correct(self, batch: StepBatch) -> StepBatch:
        """Mask answers that were cut off; decoupled, weigh and reject by the anchor against the rollout's policy.

        In bypass mode that follows for each mini-batch, by the current policy.
        """
        if self.config.algorithm.overlong_masking:
            packed = batch.packed
            truncated = torch.tensor(batch.table.truncated)[packed.indices]
            kept = without_trajectories(packed.loss_mask, truncated, packed.segments)
            batch = batch.keeping(kept, self.reduction)
        correction, packed = self.spec.correction, batch.packed
        if not self.spec.makes_old_pass:
            return batch
        inputs = CorrectionInputs(
            packed.old_log_probs, packed.rollout_log_probs, packed.loss_mask, packed.segments, self.reduction
        )
        result = correct(inputs, correction)
        self.metrics |= result.metrics
        if correction.rollout_rs is not None:
            batch = batch.keeping(result.kept, self.reduction)
        return batch.with_fields(rollout_is_weights=result.importance_weights)

    def _shape(self, batch: StepBatch) -> StepBatch:
        """Length penalty, normalisation and clip of the outcomes."""
        reward, table, packed = self.config.reward, batch.table, batch.packed
        if not reward.shapes:
            return batch
        shaping = outcome_shaping(reward, self.config.data.max_response_length)
        shaped = shape_outcomes(table.outcomes, table.actions, shaping, self.moments)
        self.metrics |= shaping_metrics(shaped, shaping, self.moments)
        before, after = (torch.tensor(x, dtype=torch.double)[packed.indices] for x in (table.outcomes, shaped))
        return batch.with_fields(
            rewards=add_at_last_action(packed.rewards, after - before, packed.mask, packed.segments)
        )

    def _penalise(self, batch: StepBatch) -> StepBatch:
        """Reward-side KL: subtract `beta * KL(old, ref)` from each action's reward, then steer beta.

        The statistic is the mean over non-empty trajectories of their mean over actions.
        """
        packed, beta = batch.packed, self.kl_controller.coefficient
        kl = packed.full_kl
        if kl is None:
            kl = kl_penalty(packed.old_log_probs, packed.ref_log_probs, self.config.algorithm.kl_penalty)
        kl = torch.where(packed.mask, kl, 0.0)
        trains = packed.segments.lengths(packed.loss_mask) > 0
        means = packed.segments.mean(kl.double(), packed.loss_mask)
        statistic = mean(means, trains).reduced(self.reduction)
        current = statistic.value
        self.metrics |= {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}
        self.kl_controller.update(current, int(statistic.count))
        return batch.with_fields(rewards=packed.rewards - beta * kl)

    def _count_groups_of_one(self, count: int) -> None:
        self.metrics["advantage/groups_of_one"] = float(count)
        if count and "groups of one" not in self._warned and self.config.rollout.n > 1:
            self._warned.add("groups of one")
            self.parts.reporter.note(
                f"warning: {count} groups are left with one answer that trains; its advantage is its raw score"
                " (advantage/groups_of_one counts them)"
            )

    @named_step
    def update_critic(self, batch: StepBatch) -> None:
        """Step 8: epochs of mini-batches on the critic, where there is one."""
        if self.parts.critic is None:
            return
        batch = batch.with_fields(ref_hidden=None)  # which only the actor reads
        critic, settings, mean = self.parts.critic, self.spec.critic, MeanOverUpdates("critic/")
        steps = balanced_mini_batches(batch, settings, self.config.trainer.seed, critic.topology)
        with critic.training():
            for batch, indices in steps:
                mini_batch = cut_mini_batch(batch, indices, settings, critic.topology)
                objective = ValueObjective(self.config.critic.cliprange_value, mini_batch.tokens)
                mean.add(*critic.update(mini_batch, objective))
        self.metrics |= mean.metrics()

    @named_step
    def update_actor(self, batch: StepBatch) -> None:
        """Step 9: epochs of mini-batches on the actor."""
        settings, terms, mean = self.spec.actor, self.spec.terms, MeanOverUpdates("actor/")
        steps = balanced_mini_batches(batch, settings, self.config.trainer.seed, self.topology)
        reference_weight = None
        if terms.uses_full_kl:
            reference_weight = self.parts.reference.output_weight()
        with self.parts.actor.training():
            for number, (batch, indices) in enumerate(steps):
                complete, corrected = self.current_policy_fields.add(batch, indices, number)
                mini_batch = cut_mini_batch(complete, indices, settings, self.topology)
                objective = PolicyObjective(self.parts.head, terms, mini_batch.tokens, reference_weight, self.combine)
                mean.add(*self.parts.actor.update(mini_batch, objective), corrected)
        self.metrics |= mean.metrics()
        if terms.kl_loss_coef is not None:
            self.metrics["actor/kl_coef"] = terms.kl_loss_coef

    @named_step
    def sync_weights(self, version: int) -> None:
        """Give the engine the actor's weights."""
        with self.parts.actor.awake():
            self.parts.engine.update_weights(self.parts.exporter.export(), version)

    @named_step
    def validate(self, step: int) -> float:
        """Answer the held-out prompts greedily; returns the mean accuracy, the same on every rank."""
        prompts = dict(enumerate(self.parts.val_prompts.prompts))
        requests = [Request(i, i, prompt.ids, (0, i)) for i, prompt in prompts.items()]
        trajectories = self.parts.engine.generate(self._share(requests), self.parts.greedy)
        with fail_together():
            score(self.spec.reward, trajectories, prompts, self.parts.model.tokenizer)
        everywhere = [
            line for lines in gather_from_all([(t.accuracy, t.reward) for t in trajectories]) for line in lines
        ]
        accuracies, rewards = ([line[i] for line in everywhere] for i in (0, 1))
        accuracy = sum(accuracies) / len(accuracies)
        self.parts.reporter.validation(step, {"val/accuracy": accuracy, "val/reward": sum(rewards) / len(rewards)})
        return accuracy
