"""The embedded engine: a transformers copy of the model generates in each trainer process, with a KV cache."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from mppo.batch.trajectory import Trajectory
from mppo.errors import ModelError
from mppo.rollout.engines.contract import Request, SamplingParams
from mppo.rollout.engines.sampling import draw, uniforms
from mppo.weights.fused import on_disk
from mppo.weights.live_weights import LiveWeights
from mppo.weights.transfer_plan import Layout, whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint


class LocalEngine:
    """Holds a whole copy of the model on every rank: for small models and machines without SGLang."""

    def __init__(self, hf_config: Any, tokenizer: Any, dtype: torch.dtype, device: torch.device, batch_size: int):
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(device).eval()
        self.tokenizer, self.device, self.batch_size = tokenizer, device, batch_size
        self.version = -1
        self.transport = PointToPoint()
        self.target: Layout | None = None

    def update_weights(self, weights: LiveWeights, version: int) -> None:
        """Raises ModelError when the tensors are not exactly the model's. Collective."""
        parameters = on_disk(self.model.named_parameters())
        if unknown := weights.layout.tensors.keys() - parameters.keys():
            raise ModelError(f"the local engine's model has no tensor {', '.join(sorted(unknown))}")
        if missing := parameters.keys() - weights.layout.tensors.keys():
            raise ModelError(f"the local engine did not receive {', '.join(sorted(missing))}")
        self.transport.run(weights.plan_for(self._target(weights)), weights, parameters)
        self.version = version

    def _target(self, weights: LiveWeights) -> Layout:
        """All tensors on every rank; made once, since the plan is kept by it."""
        if self.target is None:
            names = {rank: list(weights.layout.tensors) for rank in weights.layout.holdings}
            self.target = whole_tensors(weights.layout.tensors, names, self.model.dtype)
        return self.target

    @torch.no_grad()
    def generate(self, requests: list[Request], params: SamplingParams) -> list[Trajectory]:
        """`batch_size` requests at a time, those of similar length together; answers in the order of the requests."""
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
        answers: dict[int, Trajectory] = {}
        for start in range(0, len(by_length), self.batch_size):
            places = by_length[start : start + self.batch_size]
            for place, answer in zip(places, self._batch([requests[i] for i in places], params), strict=True):
                answers[place] = answer
        return [answers[place] for place in range(len(requests))]

    def _batch(self, requests: list[Request], params: SamplingParams) -> list[Trajectory]:
        """One token a row and step, until every row has stopped."""
        tokens, attention = self._left_padded(requests)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        random = uniforms([r.seed for r in requests], params.max_new_tokens).to(self.device)
        stop_tokens = self._stop_tokens(params)
        cache = DynamicCache()
        written: list[Tensor] = []
        log_probs: list[Tensor] = []
        stopped_at = torch.zeros(len(requests), dtype=torch.long, device=self.device)
        for step in range(params.max_new_tokens):
            output = self.model(
                input_ids=tokens,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            chosen, chosen_log_probs = draw(output.logits[:, -1], random[:, step], params)
            written.append(chosen)
            log_probs.append(chosen_log_probs)
            stops = torch.isin(chosen, stop_tokens) | self._ends_with_stop(written, params)
            stopped_at = torch.where(stops & (stopped_at == 0), step + 1, stopped_at)
            if bool((stopped_at > 0).all()):
                break
            tokens, positions = chosen[:, None], positions[:, -1:] + 1
            attention = torch.cat([attention, attention.new_ones(len(requests), 1)], 1)
        responses, log_prob_rows = torch.stack(written, 1).cpu(), torch.stack(log_probs, 1).cpu()
        return [
            self._trajectory(request, responses[row], log_prob_rows[row], int(stopped_at[row]))
            for row, request in enumerate(requests)
        ]

    def _left_padded(self, requests: list[Request]) -> tuple[Tensor, Tensor]:
        """The prompts `[B, width]`, and where they are."""
        width = max(len(r.prompt) for r in requests)
        rows = [[0] * (width - len(r.prompt)) + list(r.prompt) for r in requests]
        real = [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests]
        return torch.tensor(rows, device=self.device), torch.tensor(real, device=self.device)

    def _trajectory(self, request: Request, response: Tensor, log_probs: Tensor, stopped_at: int) -> Trajectory:
        length = stopped_at or len(response)
        prompt = torch.tensor(request.prompt)
        return Trajectory(
            index=request.index,
            group=request.group,
            tokens=torch.cat([prompt, response[:length]]),
            action_mask=torch.arange(len(prompt) + length) >= len(prompt),
            rollout_log_probs=torch.cat([torch.zeros(len(prompt)), log_probs[:length].float()]),
            finish_reason="stop" if stopped_at else "length",
            weight_version=self.version,
        )

    def _stop_tokens(self, params: SamplingParams) -> Tensor:
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            of_model = self.model.generation_config.eos_token_id
            ids.update(of_model if isinstance(of_model, list) else [of_model])
            ids.add(self.tokenizer.eos_token_id)
        return torch.tensor(sorted(i for i in ids if i is not None), dtype=torch.long, device=self.device)

    def _ends_with_stop(self, written: list[Tensor], params: SamplingParams) -> Tensor:
        """`[B]` bool: whose text so far contains one of `params.stop`."""
        if not params.stop:
            return torch.zeros_like(written[0], dtype=torch.bool)
        recent = written[-max(len(stop) for stop in params.stop) - 1 :]  # a token is at least a character, or none
        texts = self.tokenizer.batch_decode(torch.stack(recent, 1))
        return torch.tensor([any(stop in text for stop in params.stop) for text in texts], device=self.device)
