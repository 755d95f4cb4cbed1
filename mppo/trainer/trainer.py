"""The training loop and the nine steps of one training step."""

from collections.abc import Callable
from functools import partial, wraps
from time import perf_counter

import torch

from mppo.algorithm.advantages import AdvantageInputs
from mppo.algorithm.diagnostics import explained_variance
from mppo.algorithm.kl import KLController, kl_penalty
from mppo.batch.plan import check_budget
from mppo.errors import DataError, RewardError
from mppo.megatron import platform
from mppo.megatron.collectives import fail_together, gather_from_all, sum_over_data_parallel
from mppo.megatron.objectives import LogProbPass, PolicyObjective, ValueObjective, ValuePass
from mppo.rollout.engine import Request
from mppo.rollout.rewards import score
from mppo.trainer.assemble import Parts
from mppo.trainer.batches import StepBatch, balance, mini_batches
from mppo.trainer.metrics import MeanOverUpdates, batch_metrics, trajectory_metrics
from mppo.trainer.replay import ReplayBuffer, Rollout
from mppo.trainer.reporter import SampleLine
from mppo.weights.transfer import save_hf


def named_step(method: Callable) -> Callable:
    """Time a step of training (`time/<name>`, seconds) and show it to the profiler under its name."""

    @wraps(method)
    def wrapper(self, *args):
        start = perf_counter()
        with platform.named_range(method.__name__):
            result = method(self, *args)
        self.metrics[f"time/{method.__name__}"] = perf_counter() - start
        return result

    return wrapper


class Trainer:
    """Synchronous PPO. `parts` are the roles, the engine and the data, assembled from a configuration."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.config, self.resolved, self.topology = parts.config, parts.resolved, parts.topology
        self.buffer = ReplayBuffer()
        self.metrics: dict[str, float] = {}
        control = self.config.algorithm.kl_ctrl
        self.kl_controller = KLController(
            control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon
        )
        self.reduce_sum = partial(sum_over_data_parallel, topology=self.topology)

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
            try:
                self.train_step(step)
            except (DataError, RewardError):
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
        with fail_together():
            self.rollout(step)

            rollout = self.sample()
            accuracies = self.reward(rollout)
        batch = self.balance(rollout, accuracies, step)
        batch = self.old_log_probs(batch)
        batch = self.ref_log_probs(batch)
        batch = self.values(batch)
        batch = self.advantages(batch)
        self.update_critic(batch)
        self.update_actor(batch)

        self.sync_weights(step + 1)

    @named_step
    def rollout(self, step: int) -> None:
        """Answer this rank's share of the step's requests into the replay buffer."""
        data, rollout = self.config.data, self.config.rollout
        seed = self.config.trainer.seed
        prompts = self.parts.train_prompts.draw(step, data.train_batch_size, seed if data.shuffle else None)
        requests = [
            Request(group * rollout.n + sample, group, prompt.ids, (seed, step, group, sample))
            for group, prompt in enumerate(prompts)
            for sample in range(rollout.n)
        ]
        trajectories = self.parts.engine.generate(self._share(requests), self.parts.sampling)
        for trajectory in trajectories:
            trajectory.validate(self.parts.model.config.vocab_size)
        self.buffer.add(Rollout(trajectories, dict(enumerate(prompts))))

    def _share(self, requests: list[Request]) -> list[Request]:
        return requests[self.topology.rank :: torch.distributed.get_world_size()]

    @named_step
    def sample(self) -> Rollout:
        """Step 1: take the oldest rollout from the replay buffer."""
        return self.buffer.sample()

    @named_step
    def reward(self, rollout: Rollout) -> list[float]:
        """Step 2: give every trajectory its reward; returns accuracies. Samples are written even if it fails."""
        tokenizer, shown = self.parts.model.tokenizer, rollout.trajectories[: self.config.trainer.samples_per_step]
        try:
            return score(self.resolved.reward, rollout.trajectories, rollout.prompts, tokenizer)
        finally:
            self.parts.reporter.samples([SampleLine.of(t, rollout.prompts[t.group], tokenizer) for t in shown])

    @named_step
    def balance(self, rollout: Rollout, accuracies: list[float], step: int) -> StepBatch:
        """Step 3: bring every trajectory to the data-parallel rank that will train it, and pack."""
        hidden = self.parts.model.config.hidden_size
        batch = balance(rollout.trajectories, accuracies, self.resolved.actor, hidden, step, self.topology)
        for index, length in enumerate(batch.table.lengths):
            for limit in self.resolved.limits:  # before any pass of the step, and on every rank alike
                check_budget(index, length, limit)
        self.metrics |= trajectory_metrics(batch.table)
        return batch

    @named_step
    def old_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 4: the PPO anchor, under the weights before any update of this step."""
        output = self.parts.actor.forward(batch, self.resolved.actor.infer_limit, LogProbPass(self.parts.head))
        return batch.with_fields(old_log_probs=output["log_probs"])

    @named_step
    def ref_log_probs(self, batch: StepBatch) -> StepBatch:
        """Step 5: the frozen reference, where either KL path is on."""
        if self.parts.reference is None:
            return batch
        output = self.parts.reference.forward(batch, self.resolved.actor.infer_limit, LogProbPass(self.parts.head))
        return batch.with_fields(ref_log_probs=output["log_probs"])

    @named_step
    def values(self, batch: StepBatch) -> StepBatch:
        """Step 6: the critic's predictions, where the estimator needs them."""
        if self.parts.critic is None:
            return batch
        output = self.parts.critic.forward(batch, self.resolved.critic.infer_limit, ValuePass())
        return batch.with_fields(values=output["values"])

    @named_step
    def advantages(self, batch: StepBatch) -> StepBatch:
        """Step 7: shape the rewards, then estimate advantages and returns."""
        if self.config.algorithm.use_kl_in_reward:
            batch = self._penalise(batch)
        packed = batch.packed
        result = self.resolved.estimator(
            AdvantageInputs(
                rewards=packed.rewards,
                mask=packed.mask,
                kept=packed.kept,
                segments=packed.segments,
                groups=packed.groups,
                num_groups=max(batch.table.groups) + 1,
                values=packed.values,
                reduce_sum=self.reduce_sum,
            )
        )
        batch = batch.with_fields(advantages=result.advantages, returns=result.returns)
        self.metrics |= batch_metrics(batch.packed, self.reduce_sum)
        if self.parts.critic is not None:
            self.metrics["critic/explained_variance"] = explained_variance(
                packed.values, result.returns, packed.training, self.reduce_sum
            )
        return batch

    def _penalise(self, batch: StepBatch) -> StepBatch:
        """Reward-side KL: subtract `beta * KL(old, ref)` from each action's reward, then steer beta.

        The statistic is the mean over non-empty trajectories of their mean over actions (decisions: KL statistic).
        """
        packed, beta = batch.packed, self.kl_controller.coefficient
        kl = kl_penalty(packed.old_log_probs, packed.ref_log_probs, self.config.algorithm.kl_penalty)
        kl = torch.where(packed.mask, kl, 0.0)
        trains = packed.segments.lengths(packed.training) > 0
        means = packed.segments.mean(kl.double(), packed.training)
        total, count = self.reduce_sum(torch.stack([means[trains].sum(), trains.sum().double()])).tolist()
        current = total / max(count, 1.0)
        self.metrics |= {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}
        self.kl_controller.update(current, int(count))
        return batch.with_fields(rewards=packed.rewards - beta * kl)

    @named_step
    def update_critic(self, batch: StepBatch) -> None:
        """Step 8: epochs of mini-batches on the critic, where there is one."""
        if self.parts.critic is None:
            return
        mean = MeanOverUpdates("critic/")
        for mini_batch in mini_batches(batch, self.resolved.critic, self.config.trainer.seed, self.topology):
            objective = ValueObjective(self.config.critic.cliprange_value, mini_batch.actions)
            mean.add(*self.parts.critic.update(mini_batch, objective))
        self.metrics |= mean.metrics()

    @named_step
    def update_actor(self, batch: StepBatch) -> None:
        """Step 9: epochs of mini-batches on the actor."""
        actor = self.config.actor
        mean = MeanOverUpdates("actor/")
        for mini_batch in mini_batches(batch, self.resolved.actor, self.config.trainer.seed, self.topology):
            objective = PolicyObjective(
                head=self.parts.head,
                policy_loss=self.resolved.policy_loss,
                actions=mini_batch.actions,
                entropy_coeff=actor.entropy_coeff,
                report_entropy=actor.calculate_entropy,
                kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
                kl_loss_type=actor.kl_loss_type,
            )
            mean.add(*self.parts.actor.update(mini_batch, objective))
        self.metrics |= mean.metrics()
        if actor.use_kl_loss:
            self.metrics["actor/kl_coef"] = actor.kl_loss_coef

    @named_step
    def sync_weights(self, version: int) -> None:
        """Give the engine the actor's weights."""
        self.parts.engine.update_weights(self.parts.exporter.export(), version)

    @named_step
    def validate(self, step: int) -> float:
        """Answer the held-out prompts greedily; returns the mean accuracy, the same on every rank."""
        prompts = dict(enumerate(self.parts.val_prompts.prompts))
        requests = [Request(i, i, prompt.ids, (0, i)) for i, prompt in prompts.items()]
        trajectories = self.parts.engine.generate(self._share(requests), self.parts.greedy)
        with fail_together():
            accuracies = score(self.resolved.reward, trajectories, prompts, self.parts.model.tokenizer)
        everywhere = gather_from_all((accuracies, [t.reward for t in trajectories]))
        accuracies = [a for part, _ in everywhere for a in part]
        rewards = [r for _, part in everywhere for r in part]
        accuracy = sum(accuracies) / len(accuracies)
        self.parts.reporter.validation(step, {"val/accuracy": accuracy, "val/reward": sum(rewards) / len(rewards)})
        return accuracy
