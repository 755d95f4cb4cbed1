"""What a run is made of on this machine, as a table at its start."""

import torch
from megatron.core.utils import get_model_config
from rich.console import Console
from rich.table import Table

from mppo.megatron.kernels import in_use


def print_start_table(chunks: list[torch.nn.Module], console: Console) -> None:
    """Layers, kernels, precision and backends of the actor, and what is a fallback for what."""
    table = Table("", "in use", "stands in for", title="what runs", title_justify="left")
    for row in in_use(get_model_config(chunks[0])):
        table.add_row(*row)
    console.print(table, highlight=False)
