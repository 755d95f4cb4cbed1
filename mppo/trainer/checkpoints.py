"""Saving and resuming a run: `out_dir/checkpoints/step_*`, the newest named in `latest`."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from mppo.errors import ConfigError
from mppo.megatron.collectives import fail_together
from mppo.megatron.role_checkpoint import load_role, random_state, save_role, set_random_state

if TYPE_CHECKING:
    from mppo.trainer.trainer import Trainer


class Checkpoints:
    """Weights, optimizers, step, coefficient of the reward-side KL, moments of the reward and random states.

    The order of prompts follows from how many batches were drawn, the random numbers of the rollout from the step.
    """

    def __init__(self, out_dir: str, resume: bool):
        self.folder, self.resume = Path(out_dir) / "checkpoints", resume

    def save(self, trainer: "Trainer", step: int) -> None:
        """Collective. A checkpoint counts only once `latest` names it, after all of it is written."""
        target = self.folder / f"step_{step:06d}"
        parts = self._parts(trainer)
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            for name in (*parts, "run"):
                (target / name).mkdir(parents=True)
        dist.barrier()
        for name, role in parts.items():
            with role.training():
                save_role(role.chunks, role.optimizer, target / name)
        run = {
            "step": step,
            "kl_controller": trainer.kl_controller.state_dict(),
            "batches_drawn": trainer.batches_drawn,
            "reward_moments": trainer.moments.state_dict(),
            "layout": self._layout(trainer),
            **random_state(trainer.topology),
        }
        dist_checkpointing.save(run, str(target / "run"))
        if dist.get_rank() == 0:
            (self.folder / "latest.new").write_text(target.name)
            os.replace(self.folder / "latest.new", self.folder / "latest")
        dist.barrier()

    def restore(self, trainer: "Trainer") -> int:
        """Load the newest checkpoint, if there is one and resuming is on; returns the step to go on with."""
        source = self._newest()
        if source is None:
            return 0
        for name, role in self._parts(trainer).items():
            with role.training():
                load_role(role.chunks, role.optimizer, source / name)
        run = dist_checkpointing.load_common_state_dict(str(source / "run"))
        trainer.kl_controller.load_state_dict(run["kl_controller"])
        trainer.batches_drawn = run.get("batches_drawn", run["step"])
        trainer.moments.load_state_dict(run["reward_moments"])
        if run["layout"] == self._layout(trainer):  # another layout has other ranks, and starts its generators anew
            states = dist_checkpointing.load({**random_state(trainer.topology)}, str(source / "run"))
            set_random_state(states["rng"])
        return int(run["step"])

    def _newest(self) -> Path | None:
        """What rank 0 finds, so that all ranks decide alike. Raises ConfigError when it is not there on this rank."""
        latest = self.folder / "latest"
        found = [latest.read_text().strip() if self.resume and latest.is_file() else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return None
        source = self.folder / found[0]
        with fail_together():
            if not (source / "run").is_dir():
                raise ConfigError(
                    f"{latest} names {found[0]}, but {source} is not there; is trainer.out_dir on a file system that"
                    " all machines share? To start anew set trainer.resume=false"
                )
        return source

    @staticmethod
    def _parts(trainer: "Trainer") -> dict:
        roles = {"actor": trainer.parts.actor, "critic": trainer.parts.critic}
        return {name: role for name, role in roles.items() if role is not None}

    @staticmethod
    def _layout(trainer: "Trainer") -> dict:
        return {**asdict(trainer.config.parallel), "world": torch.distributed.get_world_size()}
