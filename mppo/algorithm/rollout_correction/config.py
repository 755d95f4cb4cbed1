"""The knobs of the rollout correction, its presets, and the thresholds they name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from typing import Any

from mppo.algorithm.rollout_correction.plugins import IMPORTANCE_WEIGHTS, REJECTIONS, RejectionTraits
from mppo.errors import ConfigError
from mppo.registry import nearest, typed

WHERE = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """What a threshold allows: `x <= upper`, and where there is a lower bound, `lower <= x`."""

    upper: float
    lower: float | None = None


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """How training makes up for the policy that generated not being the one that is trained.

    The log-ratio is `log pi_train - log pi_rollout`. Decoupled, pi_train is the PPO anchor (`old_log_probs`), once for
    the batch; in bypass mode the rollout's policy *is* the anchor and pi_train the current policy, for each mini-batch.
    """

    preset: str | None = None
    """A named set of the fields below; fields given beside it win."""
    rollout_is: str | None = None
    """Importance weights: `token`, `sequence`, or an import path; null: none."""
    rollout_is_threshold: Any = 2.0
    """A number: weights above it are cut to it (TIS). Bounds, `[0.5, 2.0]`: weights outside become 0 (IcePop).
    Bounds may also be a text as in the reference, `"0.5_2.0"`, in quotes: unquoted, `0.5_2` is the number 0.52."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the actions that train of the batch (in bypass mode, the mini-batch)."""
    rollout_rs: str | None = None
    """Rejection: comma-separated options; a token trains only if all keep it. null: none."""
    rollout_rs_threshold: Any = None
    """One threshold for all options, or a text with as many, comma-separated. For k1 options bounds of the ratio
    pi_train / pi_rollout, `[lower, upper]` or `"lower_upper"` (one number u stands for 1/u and u); for k2 and k3 an
    upper bound of the divergence."""
    bypass_mode: bool = False
    """Skip the old-log-prob pass: the rollout's log-probs are the PPO anchor."""
    loss_type: str = "ppo_clip"
    """In bypass mode: `ppo_clip`, or `reinforce` with importance weights."""
    denominator: str = "loss_mask"
    """What the aggregation counts: `loss_mask`, all actions, or `kept`, those that are not rejected or masked."""
    apply_to: list[str] = field(default_factory=lambda: ["policy"])
    """The terms of the loss that importance weights multiply: `policy`, and if wanted `kl` and `entropy`."""

    def __post_init__(self):
        _one_of("loss_type", self.loss_type, ("ppo_clip", "reinforce"))
        _one_of("denominator", self.denominator, ("loss_mask", "kept"))
        for term in self.apply_to:
            _one_of("apply_to", term, ("policy", "kl", "entropy"))
        if "policy" not in self.apply_to:
            raise ConfigError(f"{WHERE}.apply_to must hold policy: the weights always multiply the policy term")
        self._refuse_idle()
        _ = self.is_bounds, self.rs_bounds  # which refuse what cannot be

    def _refuse_idle(self) -> None:
        corrects, rejects = self.rollout_is is not None, self.rollout_rs is not None
        idle = [
            (self.rollout_is_threshold != 2.0 and not corrects, "rollout_is_threshold", "rollout_is is null"),
            (self.rollout_is_batch_normalize and not corrects, "rollout_is_batch_normalize", "rollout_is is null"),
            (self.apply_to != ["policy"] and not corrects, "apply_to", "rollout_is is null"),
            (self.rollout_rs_threshold is not None and not rejects, "rollout_rs_threshold", "rollout_rs is null"),
            (self.loss_type != "ppo_clip" and not self.bypass_mode, "loss_type", "bypass_mode is off"),
            (
                corrects and self.bypass_mode and self.loss_type == "ppo_clip",
                "rollout_is",
                "in bypass mode the ratio of ppo_clip is the correction already; choose loss_type=reinforce",
            ),
        ]
        for unread, name, reason in idle:
            if unread:
                raise ConfigError(f"{WHERE}.{name} is set but would have no effect: {reason}")

    @cached_property
    def is_bounds(self) -> Bounds:
        """Of the weights; a lower bound means IcePop."""
        where = f"{WHERE}.rollout_is_threshold"
        if self.rollout_is is not None:
            IMPORTANCE_WEIGHTS.get(self.rollout_is)
        bounds = _bounds(self.rollout_is_threshold, where)
        if bounds.upper < 1:
            raise ConfigError(f"{where} is {self.rollout_is_threshold!r}; weights are 1 on policy: cut them above that")
        return bounds

    @cached_property
    def rs_bounds(self) -> dict[str, Bounds]:
        """Each rejection option once, in order, and what it keeps of its divergence."""
        if self.rollout_rs is None:
            return {}
        names = list(dict.fromkeys(name.strip() for name in self.rollout_rs.split(",") if name.strip()))
        if not names:
            raise ConfigError(f"{WHERE}.rollout_rs is empty; name options, or set it to null")
        traits = [REJECTIONS.get(name).traits for name in names]
        where = f"{WHERE}.rollout_rs_threshold of "
        return {
            name: _rejection_bounds(of, threshold, where + name)
            for name, of, threshold in zip(names, traits, self._thresholds(names), strict=True)
        }

    def _thresholds(self, names: list[str]) -> list[Any]:
        where, given = f"{WHERE}.rollout_rs_threshold", self.rollout_rs_threshold
        if given is None:
            raise ConfigError(f"{where} is null; rollout_rs={self.rollout_rs} needs it")
        pieces = given.split(",") if isinstance(given, str) else [given]
        if len(pieces) == 1:
            pieces = pieces * len(names)
        if len(pieces) != len(names):
            raise ConfigError(
                f"{where} has {len(pieces)} thresholds for {len(names)} options; give one, or one for each"
            )
        return pieces


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{WHERE}.{name} is {value!r}; choose one of {', '.join(choices)}")


def _bounds(value: Any, where: str) -> Bounds:
    """A number, a numeric text, `lower_upper`, or a list of the two."""
    wanted = f"{where} is {value!r}; give a number, or bounds as in [0.5, 2.0] or '0.5_2.0'"
    if isinstance(value, bool):
        raise ConfigError(wanted)
    pieces = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split("_")
    try:
        numbers = [float(piece) for piece in pieces]
    except ValueError as error:
        raise ConfigError(wanted) from error
    if (
        len(numbers) not in (1, 2)
        or not all(0 < number < float("inf") for number in numbers)
        or numbers[0] > numbers[-1]
    ):
        raise ConfigError(f"{wanted}; bounds are positive, the lower first")
    return Bounds(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def _rejection_bounds(option: RejectionTraits, value: Any, where: str) -> Bounds:
    """In terms of the divergence that the option computes."""
    bounds = _bounds(value, where)
    if option.log_ratio:  # of -log ratio, where the bounds are of the ratio
        lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
        if lower > bounds.upper:
            raise ConfigError(f"{where} is {value!r}; one number u stands for 1/u_u, so it must be at least 1")
        return Bounds(upper=-log(lower), lower=-log(bounds.upper))
    if bounds.lower is not None:
        raise ConfigError(f"{where} is {value!r}; a divergence of this kind has only an upper bound")
    return bounds


def _geometric(**more: Any) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001", **more}


def _k3(**more: Any) -> dict[str, Any]:
    return {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01, **more}


def _presets() -> dict[str, dict[str, Any]]:
    token, sequence = {"rollout_is": "token"}, {"rollout_is": "sequence"}
    icepop = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    bypass, gradient = {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}
    return {
        "disabled": {},
        "decoupled_token_is": token,
        "decoupled_seq_is": sequence,
        "decoupled_token_icepop": icepop,
        "decoupled_seq_is_rs": {**sequence, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        "decoupled_geo_rs": _geometric(),
        "decoupled_geo_rs_seq_tis": _geometric(**sequence),
        "decoupled_geo_rs_token_tis": _geometric(**token),
        "decoupled_k3_rs": _k3(),
        "decoupled_k3_rs_seq_tis": _k3(**sequence),
        "decoupled_k3_rs_token_tis": _k3(**token),
        "bypass_ppo_clip": bypass,
        "bypass_ppo_clip_geo_rs": _geometric(**bypass),
        "bypass_ppo_clip_k3_rs": _k3(**bypass),
        "bypass_pg_is": {**gradient, **sequence},
        "bypass_pg_token_icepop": {**gradient, **icepop},
        "bypass_pg_geo_rs": _geometric(**gradient),
        "bypass_pg_geo_rs_seq_tis": _geometric(**gradient, **sequence),
        "bypass_pg_geo_rs_token_tis": _geometric(**gradient, **token),
    }


def preset_names() -> list[str]:
    return list(_presets())


def rollout_correction_config(values: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """The typed configuration from the fields given, those of a preset filled in beneath them.

    Raises ConfigError for an unknown preset, field or option, a threshold that cannot be, and a field without effect.
    """
    name = values.get("preset")
    presets = _presets()
    if name is not None and name not in presets:
        raise ConfigError(
            f"{WHERE}.preset: unknown preset {name!r}; known: {', '.join(presets)}{nearest(str(name), presets)}"
        )
    return typed(RolloutCorrectionConfig, {**(presets[name] if name else {}), **values}, WHERE, "rollout correction")
