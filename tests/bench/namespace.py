"""A network of this benchmark's own: a namespace with nothing but a loopback device, which can be made slow."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSIDE = "MPPO_BENCH_NAMESPACE"


def inside_namespace() -> bool:
    return INSIDE in os.environ


def reenter(module: str, arguments: list[str]) -> int:
    """Run the module again in a network namespace that ends with it; the exit code. It needs root, `unshare`, `ip`."""
    script = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-m", module, *arguments]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # there are no host names inside, which torch remarks on
    return subprocess.run(command, env=os.environ | {INSIDE: "1"} | quiet, check=False).returncode


@contextmanager
def throttled(mbit: int) -> Iterator[None]:
    """All that this namespace's processes tell each other goes through one link of so many Mbit/s."""
    assert inside_namespace(), "the loopback device of this machine is everybody's"
    limits = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def bytes_on_the_link() -> int:
    """Sent over this namespace's loopback device so far, with the headers of every protocol."""
    counters = next(
        line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(counters.split()[9])
