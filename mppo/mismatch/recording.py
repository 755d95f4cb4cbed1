"""An engine that asks the servers as the trainer's does, and remembers what was read and written."""

from collections.abc import Sequence
from itertools import count

from mppo.batch.trajectory import TrajectoryId
from mppo.errors import EngineError
from mppo.mismatch.evidence import Call
from mppo.mismatch.server_probe import ServerProbe
from mppo.rollout.engines.contract import Completion, Request
from mppo.weights.live_weights import LiveWeights


class RecordingEngine:
    """A `RolloutEngine` for one sampling: every group goes to one server, and no answer is asked for twice.

    Unlike the trainer's it does not mind under which weights a server answers: that is what is to be found out.
    """

    def __init__(self, probes: Sequence[ServerProbe], salt: str, rank: int):
        """`salt` is under what the trainer's engine names prefixes: the version."""
        self.probes, self.salt, self.rank = probes, salt, rank
        self.calls: dict[TrajectoryId, list[Call]] = {}
        self._numbers = count()

    async def generate(self, request: Request) -> Completion:
        """See `RolloutEngine`."""
        probe = self.probes[request.group % len(self.probes)]
        name = f"mismatch-{self.rank}-{next(self._numbers)}-{request.uid}"
        call, found = await probe.generate(request, name, self.salt)
        self.calls.setdefault(request.uid, []).append(call)
        return found

    async def update_weights(self, weights: LiveWeights, version: int) -> dict[str, float]:
        """Weights come by the trainer's own engine."""
        raise EngineError("the engine that records takes no weights; refit the trainer's own")

    async def sleep(self) -> None:
        """It holds nothing."""

    async def close(self) -> None:
        """It holds nothing."""
