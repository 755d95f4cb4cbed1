"""The embedded engine: a transformers copy of the model generates in each trainer process, with a KV cache."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from mppo.batch.trajectory import Span, Status
from mppo.config import Config
from mppo.errors import EngineError, ModelError
from mppo.megatron import platform
from mppo.rollout.engines.contract import ENGINES, Completion, Request, SamplingParams
from mppo.rollout.engines.sampling import draw, uniforms
from mppo.weights.fused import on_disk
from mppo.weights.live_weights import LiveWeights
from mppo.weights.pretrained import PretrainedModel
from mppo.weights.transfer_plan import Layout, whole_tensors
from mppo.weights.transports.point_to_point import PointToPoint


@dataclass(frozen=True)
class _Waiting:
    """A request that nobody works on yet."""

    request: Request
    answer: "asyncio.Future[Completion]"
    deadline: float
    """On the monotonic clock, seconds."""


class LocalEngine:
    """Holds a whole copy of the model on every rank: for small models and machines without SGLang.

    Requests that wait at the same time are answered together, `batch_size` at a time, in a thread beside the event
    loop. A prompt that several of them share goes through the model once.
    """

    def __init__(
        self,
        hf_config: Any,
        tokenizer: Any,
        end_tokens: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int,
    ):
        """`end_tokens` are the model's own, which end an answer unless a request ignores them."""
        self.model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(device).eval()
        self.tokenizer, self.end_tokens, self.device, self.batch_size = tokenizer, end_tokens, device, batch_size
        self.version: int | None = None
        """Of the weights; None before the first and after a failed update."""
        self.transport = PointToPoint()
        self.target: Layout | None = None
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def update_weights(self, weights: LiveWeights, version: int) -> dict[str, float]:
        """See `RolloutEngine`."""
        self.version = None
        parameters, given = on_disk(self.model.named_parameters()), weights.layout.tensors
        if unknown := given.keys() - parameters.keys():
            raise ModelError(f"the local engine's model has no tensor {', '.join(sorted(unknown))}")
        if missing := parameters.keys() - given.keys():
            raise ModelError(f"the local engine did not receive {', '.join(sorted(missing))}")
        self.transport.run(weights.plan_for(self._target(weights)), weights, parameters)
        self.version = version
        return {}

    def _target(self, weights: LiveWeights) -> Layout:
        """All tensors, whole, on every rank; made once, since the plan is kept by it."""
        if self.target is None:
            names = {rank: list(weights.layout.tensors) for rank in weights.layout.holdings}
            self.target = whole_tensors(weights.layout.tensors, names, self.model.dtype)
        return self.target

    async def sleep(self) -> None:
        """Its copy of the model stays where it is."""

    async def close(self) -> None:
        """Nothing is held that the process does not give back."""

    async def generate(self, request: Request) -> Completion:
        """See `RolloutEngine`."""
        if self.version is None:
            raise EngineError("the local engine has no weights: none came yet, or the last update failed")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, answer, monotonic() + request.timeout_s))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Answer batch after batch until nobody waits."""
        await asyncio.sleep(0)  # whoever is about to ask as well has asked after this
        while self._still_waiting():
            batch = self._next_batch()
            try:
                completions = await asyncio.to_thread(self._complete, batch)
            except Exception as error:
                for waiting in batch:
                    if not waiting.answer.done():  # whoever gave up waiting has cancelled it
                        waiting.answer.set_exception(error)
            else:
                for waiting, completion in zip(batch, completions, strict=True):
                    if not waiting.answer.done():
                        waiting.answer.set_result(completion)

    def _still_waiting(self) -> list[_Waiting]:
        """Without those whose askers gave up."""
        self._waiting = [w for w in self._waiting if not w.answer.done()]
        return self._waiting

    def _next_batch(self) -> list[_Waiting]:
        """Those of similar length together, and of one group; all of a batch are sampled alike."""
        params = self._waiting[0].request.params
        alike = [w for w in self._waiting if w.request.params == params]
        alike.sort(key=lambda w: (len(w.request.prompt_ids), w.request.uid))
        chosen = alike[: self.batch_size]
        self._waiting = [w for w in self._waiting if not any(w is taken for taken in chosen)]
        return chosen

    @torch.no_grad()
    def _complete(self, batch: Sequence[_Waiting]) -> list[Completion]:
        """One token a row and step, until every row has stopped or its time is up."""
        params = batch[0].request.params
        random = uniforms([w.request.seed for w in batch], params.max_new_tokens).to(self.device)
        stop_tokens = self._stop_tokens(params)
        deadlines = torch.tensor([w.deadline for w in batch], dtype=torch.double)
        logits, attention, positions, cache = self._read([w.request.prompt_ids for w in batch])
        written: list[Tensor] = []
        log_probs: list[Tensor] = []
        stopped_at = torch.zeros(len(batch), dtype=torch.long, device=self.device)
        late_at = torch.zeros(len(batch), dtype=torch.long)
        for step in range(params.max_new_tokens):
            chosen, chosen_log_probs = draw(logits, random[:, step], params)
            written.append(chosen)
            log_probs.append(chosen_log_probs)
            stops = torch.isin(chosen, stop_tokens) | self._ends_with_stop(written, params)
            stopped_at = torch.where(stops & (stopped_at == 0), step + 1, stopped_at)
            late_at = torch.where((deadlines < monotonic()) & (late_at == 0), step + 1, late_at)
            if bool(((stopped_at.cpu() > 0) | (late_at > 0)).all()) or step + 1 == params.max_new_tokens:
                break
            if all(w.answer.done() for w in batch):  # nobody waits for it
                break
            positions = positions + 1
            attention = torch.cat([attention, attention.new_ones(len(batch), 1)], 1)
            logits = self._next_logits(chosen[:, None], attention, positions, cache)
        rows = torch.stack(written, 1).cpu(), torch.stack(log_probs, 1).cpu(), stopped_at.cpu(), late_at
        return [self._completion(params, *(x[i] for x in rows)) for i in range(len(batch))]

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor, DynamicCache]:
        """Put each distinct prompt through the model once.

        Returns of every row the logits after its prompt `[B, V]`, where its tokens are `[B, width]`, the position of
        its last token `[B, 1]`, and the cache.
        """
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(map(len, number))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in number]
        real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in number]
        tokens, attention = torch.tensor(padded, device=self.device), torch.tensor(real, device=self.device)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache()
        logits = self._next_logits(tokens, attention, positions, cache)
        rows = torch.tensor([number[prompt] for prompt in prompts], device=self.device)
        if len(number) < len(prompts):
            cache.batch_select_indices(rows)
        return logits[rows], attention[rows], positions[rows, -1:], cache

    def _next_logits(self, tokens: Tensor, attention: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """`[B, V]`: after the last of `tokens [B, n]`, which join the cache."""
        output = self.model(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _completion(
        self, params: SamplingParams, written: Tensor, log_probs: Tensor, stopped_at: Tensor, late_at: Tensor
    ) -> Completion:
        """Of one row: up to where it stopped, or where its time was up before."""
        stopped, late = int(stopped_at), int(late_at)
        if stopped and not 0 < late < stopped:
            length, status = stopped, Status.FINISHED
        elif late and late < params.max_new_tokens:
            length, status = late, Status.ABORTED
        else:
            length, status = len(written), Status.TRUNCATED
        assert self.version is not None
        return Completion(
            token_ids=tuple(written[:length].tolist()),
            log_probs=tuple(log_probs[:length].tolist()),
            spans=(Span(0, length, self.version),),
            status=status,
        )

    def _stop_tokens(self, params: SamplingParams) -> Tensor:
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.end_tokens)}
        return torch.tensor(sorted(ids), dtype=torch.long, device=self.device)

    def _ends_with_stop(self, written: list[Tensor], params: SamplingParams) -> Tensor:
        """`[B]` bool: whose text so far contains one of `params.stop`."""
        if not params.stop:
            return torch.zeros_like(written[0], dtype=torch.bool)
        # A token is at least a byte, or none; one more, for what a tokenizer leaves out at the beginning of a text.
        recent = written[-max(len(stop.encode()) for stop in params.stop) - 1 :]
        texts = self.tokenizer.batch_decode(torch.stack(recent, 1), clean_up_tokenization_spaces=False)
        return torch.tensor([any(stop in text for stop in params.stop) for text in texts], device=self.device)


@ENGINES.register("local")
def local_engine(config: Config, model: PretrainedModel) -> LocalEngine:
    """In `rollout.dtype`, by default that of the model."""
    dtype = getattr(torch, config.rollout.dtype or config.model.dtype)
    size = config.rollout.batch_size
    return LocalEngine(model.hf_config, model.tokenizer, model.end_tokens, dtype, platform.device(), size)
