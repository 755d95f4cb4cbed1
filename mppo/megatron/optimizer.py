"""Megatron-core's optimizer and learning-rate schedule, stepped once per mini-batch."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mppo.config import OptimConfig
from mppo.errors import TrainingError, alike_on_every_rank
from mppo.megatron.master_weights import optimizers_of, set_count

PATIENCE_S = 30.0
"""Seconds that another thread waits for the end of an update."""


class Optimizer:
    """Zero, step and schedule. Megatron takes TE's or apex's fused Adam where installed, torch's otherwise."""

    def __init__(self, chunks: list[DistributedDataParallel], config: OptimConfig, dtype: torch.dtype):
        self.chunks = chunks
        self._updating = threading.Lock()
        min_lr = config.min_lr if config.lr_decay_steps else config.lr
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.adam_beta1,
                adam_beta2=config.adam_beta2,
                adam_eps=config.adam_eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=config.use_distributed_optimizer,
                overlap_param_gather=config.overlap_param_gather,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=min_lr,
            lr_warmup_steps=config.lr_warmup_steps,
            lr_decay_steps=config.lr_decay_steps or config.lr_warmup_steps + 1,
            lr_decay_style=config.lr_decay_style if config.lr_decay_steps else "constant",
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        chunks[0].config.grad_scale_func = self.megatron.scale_loss

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> dict[str, float]:
        """Look at the gradient, advance the schedule, clip and update; returns the gradient norm and the learning rate
        used.

        The schedule advances first, so that warm-up gives the first step lr / lr_warmup_steps and not 0. Raises
        TrainingError, on every rank and with nothing changed, for a gradient that is not finite.
        """
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            with alike_on_every_rank():
                raise TrainingError(f"the gradient norm is {grad_norm}; no step was made")
        with self._updating:
            self.scheduler.step(1)
            self._clip(grad_norm)
            self.megatron.step_with_ready_grads()
        return {"grad_norm": grad_norm, "lr": self.megatron.param_groups[0]["lr"]}

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No update is made inside. For another thread; raises TimeoutError when one does not come to its end."""
        if not self._updating.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"an update has not come to its end within {PATIENCE_S:g} seconds")
        try:
            yield
        finally:
            self._updating.release()

    def _clip(self, grad_norm: float) -> None:
        """As `ChainedOptimizer.step` of Megatron-core does between the norm and the update."""
        for part in optimizers_of(self.megatron):
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)

    @property
    def steps(self) -> int:
        """Updates so far. The schedule counts them, and Adam the same."""
        return self.scheduler.num_steps

    def set_steps(self, steps: int) -> None:
        """Go on as after so many updates, with the learning rate that the configuration has for then."""
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)
        for part in optimizers_of(self.megatron):
            set_count(part.optimizer, steps)
