"""What becomes of a training step that cannot be finished: nothing that was trained is lost."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch.distributed import Store

from mppo.batch.trajectory import Answer, Judgement
from mppo.errors import MppoError
from mppo.megatron.collectives import gather_from_all
from mppo.rollout.prompt_group import Group
from mppo.trainer.checkpoints import Checkpoints
from mppo.trainer.progress import Progress
from mppo.trainer.reporter import SampleLine
from mppo.trainer.rescue import Rescue
from mppo.trainer.run import Run
from mppo.trainer.stateful import Stateful


class StepGuard:
    """Refused by all ranks, a step leaves the order of data and what it steers as before it, and they save together.

    Where one rank fails alone, each saves what it holds by itself (`rescue`). Resumed, the step draws its prompts
    again; optimizer steps that it had made stay.
    """

    def __init__(self, run: Run, settled: Mapping[str, Stateful], checkpoints: Checkpoints, progress: Progress):
        """`settled` are the states that a refused step leaves as they were."""
        self.run, self.settled, self.checkpoints, self.progress = run, settled, checkpoints, progress
        self._before: dict[str, dict[str, Any]] = {}
        """Inside a step: the settled states before it."""
        self._groups: dict[int, Group] | None = None
        """Inside a step: what the buffer held before it."""

    @contextmanager
    def refusable(self) -> Iterator[None]:
        """Where all ranks raise an MppoError inside, put back and save; it is raised then."""
        self._before = {name: deepcopy(state.state_dict()) for name, state in self.settled.items()}
        self._groups = self.run.rollouts.buffer.snapshot()
        try:
            yield
        except MppoError as error:
            if error.on_every_rank:  # others do not know of an error of one rank, and would not save with it
                self._put_back()
                self._write_not_judged()
                self._save(error)
            raise
        self._before, self._groups = {}, None

    def rescue(self, store: Store) -> str:
        """Save what was trained without other ranks, and close the files; returns what came of it, in words."""
        before = dict(self._before)
        if self._groups is not None:
            before["buffer"] = self.run.rollouts.buffer.state_of(self._groups)
        rescue = Rescue(self.checkpoints.folder, self.checkpoints.states, self.run.records.description)
        said = rescue.write(store, self.progress.step, self.progress.weight_version, before)
        self.run.records.reporter.close()
        return said

    def _put_back(self) -> None:
        for name, state in self.settled.items():
            state.load_state_dict(self._before[name])
        self.run.rollouts.buffer.put_back(self._groups or {})

    def _save(self, error: MppoError) -> None:
        progress = self.progress
        try:
            self.checkpoints.save(progress.step, progress.weight_version, progress.accuracy)
        except MppoError as second:
            error.add_note(f"and what was trained could not be saved: {second}")

    def _write_not_judged(self) -> None:
        """All answers, of all ranks, over whose judgement the step is refused."""
        collector = self.run.rollouts.collector
        text = collector.rewards.text
        mine = [SampleLine.of(Answer(t, Judgement(t.uid, None)), prompt, text) for prompt, t in collector.not_judged]
        self.run.records.reporter.samples([line for lines in gather_from_all(mine) for line in lines])
