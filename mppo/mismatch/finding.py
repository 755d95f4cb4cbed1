"""What a diagnosis says: a cause, the tensor or the token, and the numbers that show it."""

from dataclasses import dataclass
from enum import StrEnum

from mppo.batch.trajectory import TrajectoryId


class Cause(StrEnum):
    STALE_TENSOR = "stale tensor"
    SWAPPED_QKV = "swapped QKV group"
    LOST_BUCKET = "lost bucket"
    PADDING = "vocabulary padding"
    UNTIED_HEAD = "untied head"
    WRONG_TENSOR = "wrong tensor"
    OTHER_WEIGHTS = "other weights"
    VERSION = "weight version"
    ROPE = "rope base"
    EPSILON = "norm epsilon"
    MODEL = "model configuration"
    RETOKENISED = "re-tokenised turn"
    MASK = "off-by-one mask"
    OTHER_MASK = "action mask"
    STALE_PREFIX = "stale prefix"
    TEMPERATURE = "temperature"
    TOP_P = "top-p"
    TOP_K = "top-k"
    BF16_HEAD = "bfloat16 head"
    UNEXPLAINED = "unexplained"


REMEDIES = {
    Cause.STALE_TENSOR: "it was not written by the refit: compare its row in mppo/weights/sglang_layout.py with the"
    " server's SGLang, and set rollout.sglang.checksum_every=1",
    Cause.SWAPPED_QKV: "query, key and value heads are put together in another order: is the server's tp-size"
    " rollout.sglang.tensor_parallel_size, and its SGLang 0.5.23?",
    Cause.LOST_BUCKET: "all that travelled together is missing: send whole weights (rollout.sglang.transport=shards, or"
    " delta.full_every=1) and look into the server's log",
    Cause.PADDING: "rows beyond the vocabulary count: zero them, and leave them out of the softmax",
    Cause.UNTIED_HEAD: "give both sides the same tie_word_embeddings, and export lm_head where it is false",
    Cause.WRONG_TENSOR: "the worker holds something else than the plan sends: does another trainer write to this"
    " server?",
    Cause.OTHER_WEIGHTS: "the server has the weights of another step, seed or model: refit it, and look into its log"
    " for why the last refit did not arrive",
    Cause.VERSION: "the server answers under another version than it was given: does another trainer write to it, was"
    " it restarted?",
    Cause.ROPE: "give both sides one config.json (rope_theta, rope_scaling)",
    Cause.EPSILON: "give both sides one config.json (rms_norm_eps)",
    Cause.MODEL: "give both sides one config.json",
    Cause.RETOKENISED: "keep the ids that the engine wrote; never decode and tokenise an answer again",
    Cause.MASK: "the action mask is in token coordinates: entry i is about token i; the shift happens in pack alone",
    Cause.OTHER_MASK: "mark as actions exactly the tokens that the engine wrote",
    Cause.STALE_PREFIX: "flush the prefix cache at a refit (rollout.sglang.in_flight=abort or retract), and never use a"
    " weight version twice",
    Cause.TEMPERATURE: "sample with rollout.temperature, by which every log-prob that is trained on is divided",
    Cause.TOP_P: "set rollout.top_p=1 and rollout.top_k=0, on the server too: log-probs that are trained on are of all"
    " tokens",
    Cause.TOP_K: "set rollout.top_k=0, on the server too: log-probs that are trained on are of all tokens",
    Cause.BF16_HEAD: "let both sides make logits in one precision (model.fp32_logits, --enable-fp32-lm-head)",
    Cause.UNEXPLAINED: "compare kernels and precision of both sides; the token is where they differ most",
}


@dataclass(frozen=True)
class Place:
    """A tensor or a token."""

    tensor: str | None = None
    worker: str | None = None
    """Which server, and which of its workers; "trainer"."""
    trajectory: TrajectoryId | None = None
    token: int | None = None
    """Position in the trajectory, prompt included."""
    turn: int | None = None
    """From 1 on."""

    def __str__(self) -> str:
        parts = [
            self.tensor,
            self.worker and f"on {self.worker}",
            self.trajectory and f"{self.trajectory}",
            self.turn and f"turn {self.turn}",
            None if self.token is None else f"token {self.token}",
        ]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Finding:
    cause: Cause
    place: Place
    shown: str
    """The numbers."""
    proved: bool = True
    """False: it explains what was measured, but something else may too."""
    or_else: tuple[Cause, ...] = ()
    """What would look the same."""
    detail: float | str | None = None
    """What was fitted or read: the temperature, the bucket, the base."""

    @property
    def remedy(self) -> str:
        return REMEDIES[self.cause]
