"""The estimate as tables."""

from rich.console import Console
from rich.table import Table

from mppo.planning.estimate import Estimate
from mppo.planning.estimate.device_memory import OnDevice
from mppo.planning.estimate.lengths import Load


def print_estimate(found: Estimate, console: Console) -> None:
    """The mix of lengths, then memory and communication, a column for each stage that differs."""
    console.print(_mix(found.load))
    stages = [stage.stage for stage in found.stages]
    table = _of_stages("the actor on the worst rank of a pipeline stage, on paper (GiB)", stages)
    table.add_row("layers", *(str(stage.layers) for stage in found.stages), end_section=True)
    for title, parts in (
        ("holds", [stage.held for stage in found.stages]),
        ("sends in an optimizer step", [stage.sent for stage in found.stages]),
    ):
        for kind in vars(parts[0]):
            table.add_row(f"{title}: {kind.replace('_', ' ')}", *(_gib(getattr(part, kind)) for part in parts))
        table.add_row(f"{title}: altogether", *(_gib(part.total) for part in parts), end_section=True)
    console.print(table)


def print_roles(found: list[OnDevice], console: Console) -> None:
    """What is on the device of each stage that differs."""
    table = _of_stages("actor, critic and reference on one device, on paper (GiB)", [s.stage for s in found])
    table.add_row("the actor, while it is updated", *(_gib(s.actor.total) for s in found))
    if any(s.critic for s in found):
        table.add_row("the critic, while it is updated", *(_gib(s.critic.total) if s.critic else "" for s in found))
    if any(s.reference for s in found):
        table.add_row("the reference's weights", *(_gib(s.reference) for s in found))
    table.add_section()
    table.add_row("all roles, while the actor is updated", *(_gib(s.actor_update) for s in found))
    if any(s.critic for s in found):
        table.add_row("all roles, while the critic is updated", *(_gib(s.critic_update) for s in found))
    console.print(table)


def _of_stages(title: str, stages: list[int]) -> Table:
    """With a column for what a row is of, and one for each stage."""
    table = Table(title=title)
    table.add_column("")
    for stage in stages:
        table.add_column("every stage" if len(stages) == 1 else f"stage {stage}", justify="right")
    return table


def _mix(load: Load) -> Table:
    table = Table(title="the mix of lengths, on the worst rank of an optimizer step", show_header=False)
    table.add_row("tokens of the fullest micro-batch", str(load.tokens))
    table.add_row("of which actions", str(load.actions))
    table.add_row("micro-batches", str(load.micro_batches))
    table.add_row("tokens of all micro-batches", str(load.all_tokens))
    table.add_row("workload of the heaviest data-parallel rank over the mean", f"{load.worst_over_mean:.4g}")
    return table


def _gib(count: int) -> str:
    return f"{count / 2**30:.4g}"
