"""How SGLang servers are launched or found, and how weights get to them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mppo.config.checks import not_negative, one_of, positive
from mppo.config.run_facts import RunFacts, Unread
from mppo.errors import ConfigError


@dataclass
class DeltaConfig:
    """Of rollout.sglang.transport=delta."""

    full_every: int = 50
    """After so many deltas whole weights are sent once; 0: never again."""
    largest_share: float = 0.25
    """Of a slice of which a larger share of the entries changed, all are sent."""

    def __post_init__(self):
        not_negative("rollout.sglang.delta", full_every=self.full_every)
        if not 0 <= self.largest_share <= 1:
            raise ConfigError(f"rollout.sglang.delta.largest_share is {self.largest_share}; it must be in [0, 1]")


@dataclass
class SglangConfig:
    """SGLang servers, of rollout.engine=sglang."""

    environment: str = "sglang-env"
    """The folder that launch/sglang.sh made: a Python environment of its own, and `serve.sh`."""
    servers: int = 1
    """Servers that are launched, by the first rank, on its machine, where nobody else can reach them."""
    tensor_parallel_size: int = 1
    """Workers of each server (`--tp-size`)."""
    expert_parallel_size: int = 1
    """Among how many of them experts are divided (`--ep-size`)."""
    server_options: list[str] = field(default_factory=list)
    """Further options of `python -m sglang.launch_server` for servers that are launched, word by word."""
    urls: list[str] = field(default_factory=list)
    """Servers that run already, `http://host:port`, instead of launching any."""
    api_key_variable: str | None = None
    """The environment variable that holds the key of those servers, which is written nowhere. Servers on other machines
    are only spoken to with one."""
    transport: str = "shards"
    """How weights get there: `shards` (each worker receives its own slices from the ranks that hold them), `delta` (of
    those what changed), `broadcast` (whole tensors by way of the first rank), `disk` (by way of a folder)."""
    delta: DeltaConfig = field(default_factory=DeltaConfig)
    buffer_mb: int = 512
    """MiB of buffers that a rank or a worker holds while weights travel; two buckets share it."""
    in_flight: str = "abort"
    """What becomes of answers that are being written when new weights come: `abort` (they end there), `retract` (they
    go on, once the new weights have read their beginning again) or `in_place` (they go on, over keys and values of the
    old ones). A step that waits for its answers leaves none."""
    colocated: bool = False
    """Servers share the trainer's GPUs: while it trains they give up the memory of weights and cache, and take weights
    over handles to memory of the same GPU (unproven: never run on one)."""
    checksum_every: int = 16
    """After the first and then every so many refits, what the workers hold is compared with what the plan says, by
    checksums of every parameter; 0: never."""
    start_timeout_s: float = 600.0
    """Seconds until a launched server is to answer."""
    update_timeout_s: float = 600.0
    """Seconds in which a server is to take new weights."""
    health_timeout_s: float = 60.0
    """Seconds in which a server is to obey a call of control, and to answer whether it is well; that it is asked while
    an answer is waited for."""

    def __post_init__(self):
        positive(
            "rollout.sglang",
            servers=self.servers,
            tensor_parallel_size=self.tensor_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            buffer_mb=self.buffer_mb,
            start_timeout_s=self.start_timeout_s,
            update_timeout_s=self.update_timeout_s,
            health_timeout_s=self.health_timeout_s,
        )
        not_negative("rollout.sglang", checksum_every=self.checksum_every)
        one_of("rollout.sglang.transport", self.transport, ("shards", "delta", "broadcast", "disk"))
        one_of("rollout.sglang.in_flight", self.in_flight, ("abort", "retract", "in_place"))
        if self.api_key_variable is not None and not self.urls:
            raise ConfigError("rollout.sglang.api_key_variable has no effect without rollout.sglang.urls")
        if self.colocated and self.transport == "broadcast":
            raise ConfigError(
                "rollout.sglang.transport=broadcast needs GPUs of their own for the servers; use shards with colocated"
            )
        if self.urls and self.server_options:
            raise ConfigError("rollout.sglang.server_options are of launched servers; those of urls run already")
        if self.transport != "delta" and self.delta != DeltaConfig():
            raise ConfigError(f"rollout.sglang.delta has no effect with rollout.sglang.transport={self.transport}")
        for url in self.urls:
            check_url(url, self.api_key_variable)

    def unread(self, run: RunFacts) -> Iterator[Unread]:
        if self.urls:
            for name in ("environment", "servers", "start_timeout_s"):
                yield Unread(name, "rollout.sglang.urls names servers that run")
        if self.transport == "disk":
            yield Unread("buffer_mb", "rollout.sglang.transport=disk has no buffers")


def check_url(url: str, api_key_variable: str | None) -> None:
    """Raises ConfigError for what is no address, and for another machine without a key."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"rollout.sglang.urls has {url!r}; give http://host:port")
    if parts.hostname not in ("127.0.0.1", "localhost", "::1") and api_key_variable is None:
        raise ConfigError(
            f"rollout.sglang.urls has {url}, on another machine: start it with --api-key, put the key into an"
            " environment variable, and name that in rollout.sglang.api_key_variable"
        )
