"""Puts the evidence together: a refit, answers to prompts, and every token of them scored by both sides."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mppo.batch.trajectory import Status, Trajectory, TrajectoryId
from mppo.errors import DataError, EngineError
from mppo.megatron.collectives import fail_together, gather_from_all
from mppo.mismatch.evidence import TOLERANCES, Bucket, Evidence, Expected, Scored, ServerState
from mppo.mismatch.hypotheses import Change
from mppo.mismatch.recording import RecordingEngine
from mppo.mismatch.rescoring import Rescorer, TrainerSide, Vectors
from mppo.mismatch.server_probe import ServerProbe
from mppo.rollout.agents.session import Agent, Session
from mppo.rollout.agents.single_turn import single_turn
from mppo.rollout.engines.contract import SamplingParams
from mppo.rollout.engines.sglang.broadcast_delivery import Broadcast
from mppo.rollout.engines.sglang.engine import SglangEngine
from mppo.rollout.engines.sglang.shard_delivery import Shards
from mppo.rollout.prompts import Prompt
from mppo.weights.transfer_plan import Layout


@dataclass(frozen=True)
class Asking:
    """How answers are sampled."""

    sampling: SamplingParams
    samples: int = 1
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(eq=False)
class BothSides:
    """A trainer and the servers that are to have its weights."""

    trainer: TrainerSide
    engine: SglangEngine
    loop: asyncio.Runner
    """On which all that is asynchronous runs."""
    agent: Agent = single_turn
    probes: Sequence[ServerProbe] = ()
    before: dict[int, dict[str, str]] = field(default_factory=dict)
    """By server: checksums before the last refit; on the first rank."""

    def __post_init__(self):
        members, vocab_size = self.engine.fleet.members, self.trainer.model.config.vocab_size
        self.probes = self.probes or [ServerProbe(m.number, m.client, vocab_size) for m in members]

    @property
    def target(self) -> Layout:
        """What workers of the servers hold."""
        return self.engine.refitter.checks.target

    def refit(self, version: int) -> None:
        """Give the servers the trainer's weights. Collective; raises EngineError where none takes them."""
        with fail_together():
            if self.trainer.topology.rank == 0:
                self.before = self.loop.run(self._checksums())
        with self.trainer.actor.onloaded_weights():
            self.loop.run(self.engine.update_weights(self.trainer.weights, version))

    async def _checksums(self) -> dict[int, dict[str, str]]:
        """Of servers that answer; one that is starting has none yet."""
        found = await asyncio.gather(*(probe.checksums() for probe in self.probes), return_exceptions=True)
        return {p.number: x for p, x in zip(self.probes, found, strict=True) if not isinstance(x, BaseException)}

    def gather(self, prompts: Mapping[int, Prompt], asking: Asking, version: int) -> tuple[Evidence, Rescorer]:
        """The evidence, and the trainer to test hypotheses on. Collective.

        Raises, on every rank, EngineError where a server cannot be asked or no prompt was answered, and DataError for a
        trajectory under a name that no engine was asked for.
        """
        topology, ranks = self.trainer.topology, torch.distributed.get_world_size()
        mine = {n: prompt for n, prompt in prompts.items() if n % ranks == topology.rank}
        with fail_together():
            own, parts = self.loop.run(self._answered(mine, asking, str(version)))
            servers = self.loop.run(self._states()) if topology.rank == 0 else ()
        everything = {uid: part for rank_parts in gather_from_all(parts) for uid, part in rank_parts.items()}
        order = sorted(everything)
        if not order:
            with fail_together():
                raise EngineError("no prompt was answered to its end; see the servers' logs, and rollout.timeout_s")
        rescorer = Rescorer(self.trainer, own, order, self.target)
        trained = self.trainer.trained(own)
        reference = dict(zip(order, rescorer.score(Change()), strict=True))
        return self._evidence(everything, trained, reference, gather_from_all(servers)[0], version), rescorer

    def _evidence(
        self,
        parts: Mapping[TrajectoryId, dict[str, Any]],
        trained: Vectors,
        reference: Vectors,
        servers: Sequence[ServerState],
        version: int,
    ) -> Evidence:
        trajectories = [
            Scored(uid, **parts[uid], trained=trained[uid], reference=reference[uid]) for uid in sorted(parts)
        ]
        dtype = next(iter(self.target.tensors.values())).dtype
        return Evidence(
            trajectories=tuple(trajectories),
            servers=tuple(servers),
            expected=self._expected(),
            version=version,
            model=self.trainer.model.config,
            temperature=self.trainer.head.temperature,
            tolerance=max(TOLERANCES[dtype], TOLERANCES[self.trainer.model.dtype]),
        )

    def _expected(self) -> Expected:
        with self.trainer.actor.onloaded_weights():
            mine = self.engine.refitter.checks.find(self.trainer.weights)
        checksums = {name: value for part in gather_from_all(mine) for name, value in part.items()}
        padded = {f"{w.tp_rank}/{region.name}" for w, h in self.target.holdings.items() for region in h.padding}
        return Expected(dict(sorted(checksums.items())), frozenset(padded), buckets_of(self.engine, self.target))

    async def _states(self) -> tuple[ServerState, ...]:
        return tuple([await probe.state(self.before.get(probe.number, {})) for probe in self.probes])

    async def _answered(
        self, prompts: Mapping[int, Prompt], asking: Asking, salt: str
    ) -> tuple[list[Trajectory], dict[TrajectoryId, dict[str, Any]]]:
        """The trajectories of these prompts, and what the engine's side knows of each."""
        engine = RecordingEngine(self.probes, salt, self.trainer.topology.rank)

        async def one(number: int, prompt: Prompt, sample: int) -> list[Trajectory]:
            session = Session(engine, TrajectoryId(number, sample), asking.sampling, asking.seed, asking.timeout_s)
            return await self.agent(prompt, session)

        asked = (one(number, prompt, n) for number, prompt in prompts.items() for n in range(asking.samples))
        answers = [t for found in await asyncio.gather(*asked) for t in found if t.status != Status.ABORTED]
        parts = await asyncio.gather(*(self._read(t, engine, salt) for t in answers))
        return answers, {t.uid: part for t, part in zip(answers, parts, strict=True)}

    async def _read(self, trajectory: Trajectory, engine: RecordingEngine, salt: str) -> dict[str, Any]:
        """A trajectory read anew by the server that wrote it."""
        if trajectory.uid not in engine.calls:
            raise DataError(f"the agent gave a trajectory of {trajectory.uid}, for which it asked no engine")
        calls, ids = tuple(engine.calls[trajectory.uid]), trajectory.token_ids.tolist()
        probe = next(probe for probe in self.probes if probe.number == calls[0].server)
        start = min(max(calls[-1].start, 1), len(ids)) - 1
        prefill, salted = await asyncio.gather(
            probe.prefill(trajectory.uid, ids), probe.prefill(trajectory.uid, ids, start, salt)
        )
        return {
            "token_ids": trajectory.token_ids,
            "action_mask": trajectory.action_mask,
            "rollout_log_probs": trajectory.rollout_log_probs,
            "calls": calls,
            "prefill": prefill,
            "salted": salted,
        }


def buckets_of(engine: SglangEngine, target: Layout) -> tuple[Bucket, ...]:
    """What travelled together in the engine's last refit, where its transport has such parts."""
    delivery = engine.refitter.delivery
    if isinstance(delivery, Shards):
        servers = sorted({worker.server for worker in target.holdings})
        return tuple(
            Bucket(
                f"message {number} of {len(route.rounds)}, rank {message.source} to worker {message.worker.tp_rank}",
                route.server,
                frozenset(f"{message.worker.tp_rank}/{send.write.name}" for send in message.sends),
            )
            for route in map(delivery.route, servers)
            for number, messages in enumerate(route.rounds, start=1)
            for message in messages
        )
    if isinstance(delivery, Broadcast):
        return tuple(
            Bucket(f"bucket {number} of {len(delivery.buckets)}", server, _made_of(bucket.tensors, target, server))
            for number, bucket in enumerate(delivery.buckets, start=1)
            for server in sorted({worker.server for worker in target.holdings})
        )
    return ()


def _made_of(names: Mapping[str, Any], target: Layout, server: int) -> frozenset[str]:
    """The workers' parameters that have a part of these Hugging Face tensors."""
    return frozenset(
        f"{worker.tp_rank}/{piece.own.name}"
        for worker, holding in target.holdings.items()
        if worker.server == server
        for piece in holding.pieces
        if piece.hf.name in names
    )
