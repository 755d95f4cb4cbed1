"""Where prompts come from, how they are answered, and what an answer is worth."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mppo.config.checks import not_negative, one_of, positive
from mppo.config.run_facts import RunFacts, Unread
from mppo.config.sglang import SglangConfig
from mppo.errors import ConfigError


@dataclass
class PromptSource:
    """Where prompts come from: files, or a generator."""

    files: list[str] = field(default_factory=list)
    """JSONL or Parquet files, read in this order."""
    generator: str | None = None
    """A registered generator, or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the generator."""

    @property
    def given(self) -> bool:
        return bool(self.files or self.generator)

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.files:  # where there is neither, an override has switched off a generator and its knobs with it
            yield Unread("options", "they are of a generator, and the prompts come from files")


@dataclass
class DataConfig:
    """Prompts, and how long they and their answers may be."""

    train: PromptSource = field(default_factory=PromptSource)
    """Prompts to train on."""
    val: PromptSource = field(default_factory=PromptSource)
    """Held-out prompts, answered as rollout.val_kwargs says; optional."""
    prompt_key: str = "prompt"
    """Field with the prompt: a text, or chat messages (a list of {role, content}); where the assistant has the last
    word, its message is continued. A field inside another is named by its path: `a.b`."""
    answer_key: str = "ground_truth"
    """Field with what the reward function compares with: `reward_model.ground_truth` in files made for verl."""
    source_key: str = "data_source"
    """Field with the name of the row's data source; read where `reward.sources` is given."""
    tools_key: str | None = None
    """Field with the tools that the chat template shows: a list of JSON schemas, or that as a text; null: none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: `{enable_thinking: false}`."""
    train_batch_size: int = 8
    """Prompts per training step; each is answered rollout.n times."""
    max_prompt_length: int = 1024
    """Tokens."""
    max_response_length: int = 1024
    """Tokens."""
    overlong_prompts: str = "error"
    """`error`, or `skip`: leave prompts over max_prompt_length out; their number is printed."""
    shuffle: bool = True
    """Draw a new order of prompts each epoch, from trainer.seed."""

    def __post_init__(self):
        positive(
            "data",
            train_batch_size=self.train_batch_size,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
        )
        one_of("data.overlong_prompts", self.overlong_prompts, ("error", "skip"))

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if not run.has_sources:
            yield Unread("source_key", "reward.sources names no data source")


@dataclass
class ValidationSamplingConfig:
    """How held-out prompts are answered."""

    n: int = 1
    """Answers per prompt; with more than one `val/pass@k` is reported too."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """As in training."""
    top_k: int = 0
    """As in training."""

    def __post_init__(self):
        positive("rollout.val_kwargs", n=self.n)
        not_negative("rollout.val_kwargs", temperature=self.temperature, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.val_kwargs.top_p is {self.top_p}; it must be in (0, 1]")
        if self.n > 1 and not self.temperature:
            raise ConfigError(
                f"rollout.val_kwargs.n={self.n} greedy answers would all be the same; raise"
                " rollout.val_kwargs.temperature"
            )

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if not self.temperature:
            yield Unread("top_p", "rollout.val_kwargs.temperature=0 is greedy")
            yield Unread("top_k", "rollout.val_kwargs.temperature=0 is greedy")
        if not run.has_validation:
            for name in ("n", "temperature", "top_p", "top_k"):
                yield Unread(name, "data.val is not given")


@dataclass
class RolloutConfig:
    """How prompts are answered."""

    engine: str = "local"
    """A registered engine, or `package.module:function`. `local`: a copy of the model generates in each trainer
    process, with a KV cache. `sglang`: servers that are launched or attached to (rollout.sglang)."""
    timeout_s: float = 1800.0
    """Seconds that one call of the engine may take; an answer that is not finished by then is aborted, and does not
    train."""
    n: int = 1
    """Answers per prompt."""
    temperature: float = 1.0
    """Divides the logits, of generation and of every log-prob that is trained on."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1: among all."""
    top_k: int = 0
    """Sample among so many of the likeliest tokens; 0: among all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer; they stay in it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer, besides the model's own end-of-text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text, up to data.max_response_length."""
    dtype: str | None = None
    """dtype of the generating copy of the model; null: model.dtype."""
    batch_size: int = 256
    """Sequences that one process generates at a time."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    val_kwargs: ValidationSamplingConfig = field(default_factory=ValidationSamplingConfig)

    def __post_init__(self):
        positive(
            "rollout", timeout_s=self.timeout_s, n=self.n, temperature=self.temperature, batch_size=self.batch_size
        )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"rollout.top_k is {self.top_k}; 0 means all tokens, otherwise give a number of them")
        if "" in self.stop:
            raise ConfigError("rollout.stop has an empty text, which every answer ends with; leave it out")
        if any(token < 0 for token in self.stop_token_ids):
            raise ConfigError(f"rollout.stop_token_ids is {list(self.stop_token_ids)}; token ids are not negative")
        if self.dtype is not None:
            one_of("rollout.dtype", self.dtype, ("bfloat16", "float32"))

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.engine != "sglang":
            yield Unread("sglang", f"rollout.engine={self.engine} asks no server")
        if self.engine == "sglang":
            yield Unread("batch_size", "rollout.engine=sglang batches by itself")


@dataclass
class OverlongBufferConfig:
    """Soft punishment of long answers (DAPO, 2503.14476): from max_response_length - len on, linearly more."""

    len: int = 0
    """Tokens before max_response_length over which the penalty grows; 0: no penalty."""
    penalty_factor: float = 1.0
    """The penalty at max_response_length."""

    def __post_init__(self):
        not_negative("reward.overlong_buffer", len=self.len)
        positive("reward.overlong_buffer", penalty_factor=self.penalty_factor)
        if self.penalty_factor != 1.0 and not self.len:
            raise ConfigError("reward.overlong_buffer.penalty_factor has no effect with reward.overlong_buffer.len=0")


@dataclass
class RewardConfig:
    """How an answer is scored, and how its outcome is shaped before advantages: penalty, normalisation, clip."""

    function: str = "exact_match"
    """A registered reward, or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Knobs of the reward function."""
    sources: dict[str, Any] = field(default_factory=dict)
    """A reward for each data source, `{gsm8k: {function: math_verify}, ...}`, with `options` where it has knobs. A row
    names its own in the field data.source_key; one whose source is not here is refused. {}: `function` judges all."""
    skip_special_tokens: bool = False
    """Leave special tokens (`<think>`, where it is one) out of the text that a reward function sees, and out of the
    samples on disk. The token that ended the answer is left out in any case."""
    workers: int = 4
    """Processes of each rank that drives rollouts, in which the function runs beside generation. 0: in the trainer's
    own process, for debugging; there nothing ends a plain function at its deadline. `async` functions run in the
    trainer's event loop in any case."""
    timeout_s: float = 60.0
    """Seconds that one call of the function may take."""
    on_error: str = "raise"
    """What becomes of an answer for which the function raises, is late, or returns None or a number that is not finite:
    `raise` ends the run, `abstain` leaves the answer out, `score` gives it `error_score`."""
    error_score: float | None = None
    """The score of such an answer, with on_error=score."""
    max_failure_rate: float = 0.5
    """More failures than this share of the latest 1,000 answers that a rank judged end the run (of at least 100), with
    on_error=abstain and score."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    running_normalization: bool = False
    """Subtract the mean and divide by the deviation of all outcomes of the run so far, this step's included."""
    clip: float | None = None
    """The shaped outcome stays in [-clip, clip]; null: no bound."""

    def __post_init__(self):
        positive("reward", clip=self.clip, timeout_s=self.timeout_s)
        not_negative("reward", workers=self.workers)
        one_of("reward.on_error", self.on_error, ("raise", "abstain", "score"))
        if self.on_error == "score" and self.error_score is None:
            raise ConfigError("reward.on_error=score needs reward.error_score")
        if self.on_error != "score" and self.error_score is not None:
            raise ConfigError(f"reward.error_score has no effect with reward.on_error={self.on_error}")
        if self.error_score is not None and not math.isfinite(self.error_score):
            raise ConfigError(f"reward.error_score is {self.error_score}; it must be finite")
        if not 0 < self.max_failure_rate <= 1:
            raise ConfigError(f"reward.max_failure_rate is {self.max_failure_rate}; it must be in (0, 1]")
        if self.on_error == "raise" and self.max_failure_rate != 0.5:
            raise ConfigError(
                "reward.max_failure_rate has no effect with reward.on_error=raise: one failure ends the run"
            )

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.sources:
            yield Unread("function", "reward.sources has a reward for each data source")
            yield Unread("options", "reward.sources has a reward, with its options, for each data source")
        if not run.reads_rewards:
            for name in ("overlong_buffer", "running_normalization", "clip"):
                yield Unread(name, f"{run.adv_estimator} reads the parts of the reward, not the whole")

    @property
    def shapes(self) -> bool:
        """Whether the outcome is changed at all."""
        return bool(self.overlong_buffer.len or self.running_normalization or self.clip is not None)
