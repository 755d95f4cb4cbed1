"""Reward functions in worker processes: each call under a deadline that ends the process, not only the waiting."""

import asyncio
import multiprocessing
import pickle
from collections.abc import Iterable
from multiprocessing.context import BaseContext

from pebble import ProcessExpired, ProcessPool

from mppo.errors import ConfigError, RewardError
from mppo.rollout.reward_calls import CallResult, Failure, FailureKind, Outcome, call, late, prepare_worker
from mppo.rollout.rewards import RewardFunction, Sample

TASK_SECONDS = 0.05
"""Samples travel together as long as they should take no longer than this; a task of its own costs a millisecond."""


class RewardPool:
    """Worker processes that call plain reward functions.

    They come from a fork server, which is started afresh: torch and the process groups of the trainer are not in it.
    They start with the first call. A worker that passes the deadline is killed and replaced; other samples of its task
    are called again, so only what is late itself is lost.
    """

    def __init__(self, functions: Iterable[RewardFunction], workers: int, timeout_s: float):
        """Raises ConfigError for a function that workers cannot import, such as a lambda."""
        self.functions, self.workers, self.timeout_s = tuple(functions), workers, timeout_s
        self._pool: ProcessPool | None = None
        self._seconds_per_sample: dict[str, float] = {}
        for function in self.functions:
            _check_it_travels(function)

    async def call(self, function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
        """Outcomes of the samples of a group, in their order. Many groups may wait at once.

        Raises RewardError when the workers cannot start, and for a sample that cannot be pickled.
        """
        if function.batch:
            return await self._together(function, samples)
        size = self._samples_per_task(function)
        tasks = [samples[start : start + size] for start in range(0, len(samples), size)]
        outcomes = await asyncio.gather(*(self._each(function, task) for task in tasks))
        return [outcome for task in outcomes for outcome in task]

    def close(self) -> None:
        """End the workers, whatever they do."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _running(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                self.workers, initializer=prepare_worker, initargs=[self.functions], context=_fork_server()
            )
        return self._pool

    def _samples_per_task(self, function: RewardFunction) -> int:
        """One until it is known how long a call takes."""
        known = self._seconds_per_sample.get(function.name)
        return 1 if known is None else max(1, int(TASK_SECONDS / max(known, 1e-6)))

    async def _each(self, function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
        """Where the task failed as a whole, its samples again, each by itself."""
        result = await self._task(function, samples)
        if isinstance(result, CallResult):
            return result.outcomes
        if len(samples) == 1:
            return [result]
        alone = await asyncio.gather(*(self._each(function, [sample]) for sample in samples))
        return [outcome for outcomes in alone for outcome in outcomes]

    async def _together(self, function: RewardFunction, samples: list[Sample]) -> list[Outcome]:
        result = await self._task(function, samples)
        return [result] * len(samples) if isinstance(result, Failure) else result.outcomes

    async def _task(self, function: RewardFunction, samples: list[Sample]) -> CallResult | Failure:
        """One call in a worker: what came of it, or why nothing did."""
        try:
            future = self._running().schedule(call, args=(function, samples), timeout=self.timeout_s)
            result = await asyncio.wrap_future(future)
        except TimeoutError:
            return late(self.timeout_s)
        except ProcessExpired as error:
            return Failure(FailureKind.RAISED, f"its worker process died with exit code {error.exitcode}")
        except Exception as error:
            raise RewardError(
                f"reward.function={function.name}: its worker processes cannot be used ({type(error).__name__}:"
                f" {error}); if they ended, the reason stands on stderr; reward.workers=0 calls it in this process"
            ) from error
        self._learn(function, result.seconds / len(samples))
        return result

    def _learn(self, function: RewardFunction, seconds: float) -> None:
        known = self._seconds_per_sample.get(function.name, seconds)
        self._seconds_per_sample[function.name] = known + 0.2 * (seconds - known)


def _check_it_travels(function: RewardFunction) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward.function={function.name} cannot be sent to worker processes ({error}); define it at the top of"
            " a module, or set reward.workers=0"
        ) from error


def _fork_server() -> BaseContext:
    """Its server has imported what every worker needs, so that a worker starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "mppo.rollout.reward_calls", "mppo.rollout.tasks"])
    return context
