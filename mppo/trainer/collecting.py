"""What the answers of all ranks are worth, by group."""

from collections import defaultdict

from mppo.megatron.collectives import gather_from_all
from mppo.trainer.replay import Rollout


def values_of_groups(rollout: Rollout, metric: str) -> dict[int, list[float]]:
    """Reward or accuracy of all answers by group, over all ranks. Collective."""
    mine = [(t.group, t.total_reward if metric == "reward" else t.accuracy) for t in rollout.trajectories]
    values: dict[int, list[float]] = defaultdict(list)
    for lines in gather_from_all(mine):
        for group, value in lines:
            values[group].append(value)
    return dict(values)


def greedy_rewards(rollout: Rollout) -> dict[int, float]:
    """Total reward of the greedy answer to each prompt, by group, over all ranks. Collective."""
    everyone = gather_from_all([(t.group, t.total_reward) for t in rollout.greedy])
    return {group: reward for lines in everyone for group, reward in lines}
