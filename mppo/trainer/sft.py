"""Supervised fine-tuning: the same hook, batches and schedule with the cross entropy of given answers as objective."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from mppo.algorithm.statistics import mean
from mppo.batch.trajectory import Answer, Judgement, Trajectory, TrajectoryId
from mppo.config import Config
from mppo.errors import ConfigError, DataError, MppoError, alike_on_every_rank, alike_on_machine
from mppo.megatron import topology
from mppo.megatron.collectives import data_parallel_reduction, fail_together
from mppo.megatron.head import PolicyHead
from mppo.megatron.objectives import LogProbPass, SupervisedObjective
from mppo.megatron.topology import Topology
from mppo.rollout.prompts import Prompt, PromptStream
from mppo.trainer.assemble import build_actor, in_words, read_prompts, records
from mppo.trainer.batches import StepBatch, check_budgets, cut_mini_batch
from mppo.trainer.metrics import MeanOverUpdates
from mppo.trainer.model_checks import check_models
from mppo.trainer.one_ahead import OneAhead
from mppo.trainer.redistribution import balanced_mini_batches, distribute
from mppo.trainer.run_spec import RunSpec, make_run_spec
from mppo.trainer.skipped_steps import SkippedSteps
from mppo.weights.export import export_hf
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel, open_model

UNREAD = (
    *("rollout", "reward", "algorithm", "critic", "ref"),
    *(f"actor.{name}" for name in ("policy_loss", "entropy_coeff", "calculate_entropy", "use_kl_loss")),
    *(f"actor.{name}" for name in ("kl_loss_coef", "kl_loss_type", "old_log_prob_pass")),
    *(f"trainer.{name}" for name in ("save_freq", "save_hf_freq", "keep_checkpoints", "resume", "resume_changed")),
    *(f"trainer.{name}" for name in ("test_freq", "val_before_train", "critic_warmup", "samples_per_step")),
)
"""Groups and fields of the configuration that say nothing to supervised training."""


class SupervisedTrainer:
    """Trains the actor on the answers that `data.answer_key` holds. `actor` says how, `data` on what."""

    def __init__(self, config: Config):
        with alike_on_machine():
            _refuse_unread(config)
            replicas = topology.data_parallel_size(config.parallel, _world_size())
            self.spec: RunSpec = make_run_spec(config, replicas, supervised=True)
            self.config, self.model = config, open_model(config.model, config.trainer.seed)
            check_models(self.spec, self.model.config, None)
            train, self.held_out = read_prompts(config, self.model)
        self.data = in_words(train, self.held_out)
        self.topology: Topology = topology.initialize(config.parallel, config.trainer.seed)
        self.actor = build_actor(self.spec, self.model, self.topology)
        self.head = PolicyHead(
            self.model.config.vocab_size, 1.0, self.topology.tp_group, fp32_logits=config.model.fp32_logits
        )
        self.stream = PromptStream(train, config.trainer.seed if config.data.shuffle else None)
        self.records = records(config, {"actor": self.model}, self.topology)
        self.skipped = SkippedSteps(config.trainer.on_non_finite, config.trainer.max_skipped_steps)

    def train(self) -> float:
        """Run to the last step; returns the mean loss of a token of the held-out answers, or of the last batch."""
        trainer, reporter = self.config.trainer, self.records.reporter
        reporter.start(0)
        for line in (*self.spec.warnings, self.data):
            reporter.note(line)
        loss = 0.0
        for step in range(trainer.total_training_steps):
            with self._refusable(step):
                metrics = self.train_step(step)
            reporter.step(step + 1, metrics)
            loss = metrics.get("sft/token_loss", loss)  # absent where every update was left out
        if self.held_out is not None:
            prompts = {number: self.held_out[number] for number in range(len(self.held_out))}
            loss = self.token_loss(self.batch(prompts, trainer.total_training_steps))
            reporter.note(f"held-out loss per token: {loss:.4f}")
        if trainer.save_hf:
            self.export("hf")
        reporter.finish({})
        return loss

    def export(self, name: str) -> None:
        """The actor as a Hugging Face folder of that name. Collective."""
        architecture, numbers = self.model.architecture, self.model.config
        weights = LiveWeights.of_chunks(self.actor.chunks, architecture, numbers, self.topology)
        with self.actor.onloaded_weights():
            export_hf(weights, self.model, f"{self.config.trainer.out_dir}/{name}")

    @contextmanager
    def _refusable(self, step: int) -> Iterator[None]:
        """If all ranks refuse what is inside, what was trained in `step` steps is exported first."""
        try:
            yield
        except MppoError as error:
            if error.on_every_rank and step and self.config.trainer.save_hf:
                self.export(f"hf_step_{step:06d}")
                error.add_note(f"what was trained before is in {self.config.trainer.out_dir}/hf_step_{step:06d}")
            raise

    def train_step(self, step: int) -> dict[str, float]:
        """Draw prompts, and go through their answers in epochs of mini-batches."""
        batch = self.batch(self.stream.draw(self.config.data.train_batch_size), step)
        settings, over_updates = self.spec.actor, MeanOverUpdates("sft/")
        steps = balanced_mini_batches(batch, settings, self.config.trainer.seed, self.topology)
        reads = SupervisedObjective.reads
        mini_batches = OneAhead(cut_mini_batch(b, i, settings, self.topology, reads) for b, i in steps)
        with self.actor.onloaded():
            for mini_batch in mini_batches:
                objective = SupervisedObjective(self.head, mini_batch.total_tokens)
                update = partial(self.actor.update, mini_batch, objective, mini_batches.fetch)
                over_updates.add(self.skipped.attempt(update))
        return over_updates.metrics()

    def batch(self, prompts: Mapping[int, Prompt], step: int) -> StepBatch:
        """Each rank makes the trajectories of its share of the prompts. Collective."""
        ranks, rank = _world_size(), self.topology.rank
        with fail_together():
            mine = [
                supervised_answer(number, prompt, self.model, self.config.data.max_response_length)
                for number, prompt in prompts.items()
                if number % ranks == rank
            ]
        with alike_on_every_rank():
            batch = distribute(mine, self.spec, self.model.config, step, self.topology)
            check_budgets(batch.table, self.spec.actor.limits, self.topology)
        return batch

    def token_loss(self, batch: StepBatch) -> float:
        """Mean negative log-prob of the tokens of all answers of the batch. Collective."""
        log_probs = self.actor.forward(batch, self.spec.actor.infer_limit, LogProbPass(self.head))["log_probs"]
        return mean(-log_probs, batch.packed.loss_mask).reduced(data_parallel_reduction(self.topology)).value


def supervised_answer(number: int, prompt: Prompt, model: PretrainedModel, longest: int) -> Answer:
    """The given answer and the end of text as actions. Raises DataError for one of more than `longest` tokens."""
    written = model.tokenizer(str(prompt.ground_truth), add_special_tokens=False)["input_ids"]
    answer = [*written, model.tokenizer.eos_token_id]
    if len(answer) > longest:
        raise DataError(
            f"the answer to prompt {number} has {len(answer)} tokens, over data.max_response_length={longest};"
            " raise that, or leave the row out"
        )
    token_ids = torch.tensor([*prompt.token_ids, *answer])
    is_answer = torch.arange(len(token_ids)) >= len(prompt.token_ids)
    uid = TrajectoryId(number, 0)
    return Answer(Trajectory(uid, token_ids, is_answer, torch.zeros(len(token_ids))), Judgement(uid, 0.0))


def _refuse_unread(config: Config) -> None:
    """Raise ConfigError for a field that is set and has no effect here."""
    for path in UNREAD:
        changed = _first_change(attrgetter(path)(config), attrgetter(path)(Config()), path)
        if changed is not None:
            raise ConfigError(f"{changed} is set but would have no effect: mppo sft does not read it; unset it")


def _first_change(given: Any, default: Any, path: str) -> str | None:
    """The path of a field that differs, from `path` down."""
    if not is_dataclass(given):
        return path if given != default else None
    below = (_first_change(getattr(given, f.name), getattr(default, f.name), f"{path}.{f.name}") for f in fields(given))
    return next((found for found in below if found is not None), None)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))
