"""Every estimator on a device that is pretended, on tensors with content.

LD_PRELOAD=pretended_gpu.so python -m tests.fake_job.estimators FILE

Written for each: the error it ended in, or null; and that of a mixture of host and device.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from tests.fake_job.pretended_gpu import pretend

pretend()

from mppo.algorithm.advantages import ESTIMATORS, AdvantageInputs  # noqa: E402
from mppo.algorithm.segments import Segments  # noqa: E402
from tests.fake_job.pretended_device import OnDevice, PretendedDevice  # noqa: E402
from tests.unit.advantage_cases import estimate  # noqa: E402


def inputs() -> AdvantageInputs:
    """Two groups of two answers; one token is context, one is rejected, and one answer does not train at all."""
    torch.manual_seed(0)
    lengths, count = torch.tensor([3, 2, 4, 2]), 4
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    mask[4] = False
    loss_mask = mask.clone()
    loss_mask[[6, 9, 10]] = False
    numbers = torch.randn(5, len(mask))
    return AdvantageInputs(
        rewards=numbers[0],
        action_mask=mask,
        loss_mask=loss_mask,
        segments=Segments(torch.repeat_interleave(torch.arange(count), lengths), count),
        groups=torch.tensor([0, 0, 1, 1]),
        num_groups=2,
        indices=torch.arange(count),
        num_trajectories=count,
        values=numbers[1],
        old_log_probs=-numbers[2].abs(),
        sum_pi_squared=numbers[3].abs().clamp(max=1),
        rollout_is_weights=numbers[4].exp(),
        reward_baselines=torch.randn(count),
        reward_parts={"right": torch.randn(count), "brief": torch.randn(count)},
    )


def on_device(x: AdvantageInputs) -> AdvantageInputs:
    moved = {f.name: OnDevice(v) for f in fields(x) if isinstance(v := getattr(x, f.name), torch.Tensor)}
    parts = {name: OnDevice(part) for name, part in x.reward_parts.items()}
    return replace(x, **moved, segments=replace(x.segments, ids=OnDevice(x.segments.ids)), reward_parts=parts)


def compare(name: str) -> None:
    expected = estimate(name, inputs())
    with PretendedDevice():
        found = estimate(name, on_device(inputs()))
    for made, right in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert isinstance(made, OnDevice), "the result is on the host"
        torch.testing.assert_close(made.held, right, rtol=0, atol=0, equal_nan=True)


def mix() -> None:
    with PretendedDevice():
        OnDevice(torch.ones(2)) + torch.ones(2)


def error_of(fn: Callable[[], None]) -> str | None:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main(file: str) -> None:
    found = {name: error_of(lambda name=name: compare(name)) for name in ESTIMATORS.names()}
    Path(file).write_text(json.dumps(found | {"mixed": error_of(mix)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
