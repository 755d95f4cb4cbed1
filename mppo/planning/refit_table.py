"""A refit as a table."""

from rich.console import Console
from rich.table import Table

from mppo.planning.refit import Bound, Range, Refit


def print_refit(found: Refit, console: Console) -> None:
    """Least, mean and most of ranks and workers; then the bound by link, for both ways."""
    links = found.links
    table = Table(title="weights to SGLang: a refit with whole weights, on paper", show_header=False)
    table.add_row("servers x workers", f"{found.servers} x {found.workers}")
    table.add_row("taken to stand", found.placement)
    table.add_row("transport", found.transport)
    table.add_row("the model", f"{_gb(found.model_bytes)} in {found.dtype}", end_section=True)
    table.add_row("", "by shards: least, mean, most")
    table.add_row("a rank sends", _range(found.sent))
    table.add_row("messages of a rank", _counts(found.messages))
    table.add_row("workers it sends to", _counts(found.peers))
    table.add_row("senders of a server", _counts(found.senders_of_server))
    table.add_row("a worker receives", _range(found.received))
    table.add_row("what it holds, the minimum", _range(found.minimum))
    table.add_row("received over the minimum, at most", f"{found.received_over_minimum:g}")
    table.add_row("within machines", f"{found.share_within:.1%} of {_gb(found.bytes_within + found.bytes_between)}")
    table.add_section()
    assumed = f"{links.nic_gbit:g} Gbit/s and NVLink of {links.nvlink_gbyte:g} GB/s"
    table.add_row("assumed", f"{links.gpus_per_machine} GPUs a machine, each with a card of {assumed}")
    table.add_row("at line rate, by shards", _bound(found.bound_s))
    table.add_row("at line rate, by broadcast", _bound(found.broadcast_s))
    console.print(table)


def _gb(size: float) -> str:
    """In units of 10^9 bytes, as line rates are."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e3:,.1f} kB"


def _range(found: Range) -> str:
    return ", ".join(_gb(size) for size in (found.least, found.mean, found.most))


def _counts(found: Range) -> str:
    return f"{found.least:,}, {found.mean:,.1f}, {found.most:,}"


def _bound(bound: Bound) -> str:
    return (
        f"{bound.whole:.3g} s (busiest rank's card {bound.sender_nic:.3g} s, worker's card {bound.receiver_nic:.3g} s,"
        f" NVLink {bound.nvlink:.3g} s)"
    )
