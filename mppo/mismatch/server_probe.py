"""What one SGLang server is asked to find out what it holds, and how it scores tokens."""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from mppo.batch.trajectory import TrajectoryId
from mppo.errors import EngineError, ModelError
from mppo.megatron.model_config import ModelConfig
from mppo.mismatch.evidence import Call, ServerState
from mppo.rollout.engines.contract import Completion, Request
from mppo.rollout.engines.sglang.client import ServerGone, SglangClient, completion, request_fields
from mppo.weights.architectures import architecture_of

NO_VERSION = -1
"""Of weights that no refit brought."""
SCORE_S = 600.0
"""Seconds in which a server is to read a trajectory."""


class ServerProbe:
    """Of one server; all calls come from one event loop."""

    def __init__(self, number: int, client: SglangClient, vocab_size: int):
        self.number, self.client, self.vocab_size = number, client, vocab_size

    async def state(self, before: Mapping[str, str]) -> ServerState:
        """What it says of itself; `before` are its checksums before the last refit. Raises EngineError."""
        told = await self.client.get("/model_info")
        return ServerState(
            number=self.number,
            url=self.client.url,
            version=str(told["weight_version"]),
            checksums=await self.checksums(),
            before=before,
            model=await self.model(),
        )

    async def checksums(self) -> dict[str, str]:
        """`{"<tp rank>/<parameter>": checksum}`. Raises EngineError for a server that does not have them."""
        answer = await self.client.post("/weights_checker", {"action": "checksum"}, SCORE_S)
        try:
            return {
                f"{worker['parallelism_info'][0]['tp_rank']}/{name}": value
                for worker in answer["ranks"]
                for name, value in worker["checksums"].items()
            }
        except (KeyError, TypeError, IndexError) as error:
            raise ServerGone(f"{self.client.url}: its checksums cannot be read: {type(error).__name__}") from error

    async def model(self) -> ModelConfig | None:
        """As it read its folder and was told by `--json-model-override-args`; None where the folder is not here."""
        info = await self.client.get("/server_info")
        return model_of(Path(info["model_path"]), info.get("json_model_override_args") or "{}")

    async def generate(self, request: Request, name: str, salt: str) -> tuple[Call, Completion]:
        """As the engine asks it, but for log-probs over all tokens where top-p or top-k leave some out."""
        body = request_fields(request, name, salt)
        answer = await self.client.post("/generate", body, timeout_s=request.timeout_s)
        found = completion(_numbered(answer))
        call = Call(
            server=self.number,
            prompt_ids=request.prompt_ids,
            written_ids=found.token_ids,
            log_probs=found.log_probs,
            spans=found.spans,
            cached_tokens=int(answer["meta_info"].get("cached_tokens", 0)),
            asked=request.params,
        )
        return call, found

    async def prefill(self, uid: TrajectoryId, ids: Sequence[int], start: int = 0, salt: str | None = None) -> Tensor:
        """`[L]`: the log-probs of ids from number `start` on, at temperature 1; NaN before, and of the first.

        Without a `salt` nothing comes out of the prefix cache; with one, prefixes of up to `start` tokens may. Raises
        EngineError where it scores other ids than it was sent.
        """
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "cache_salt": salt or f"mismatch-{secrets.token_hex(8)}",
        }
        answer = await self.client.post("/generate", body, timeout_s=SCORE_S)
        entries = answer["meta_info"]["input_token_logprobs"]
        # SGLang 0.5.23 says 0 for the last id of the vocabulary, though it scores the right one.
        said = [token if token < self.vocab_size - 1 else 0 for token in ids[start:]]
        if [entry[1] for entry in entries] not in (said, list(ids[start:])):
            raise EngineError(f"{self.client.url} scored other tokens of {uid} than it was sent")
        found = torch.full((len(ids),), torch.nan)
        found[start + 1 :] = torch.tensor([entry[0] for entry in entries[1:]])
        return found


def _numbered(answer: Any) -> Any:
    """An answer in which every version is a number: nobody has refitted a server that says another word."""
    try:
        meta = answer["meta_info"]
        spans = [{**span, "version": _number(span["version"])} for span in meta.get("weight_versions") or ()]
        return {
            **answer,
            "meta_info": {**meta, "weight_version": _number(meta["weight_version"]), "weight_versions": spans},
        }
    except (KeyError, TypeError):
        return answer  # `completion` says what is missing


def _number(version: Any) -> str:
    return str(version) if str(version).isdigit() else str(NO_VERSION)


def model_of(folder: Path, overrides: str) -> ModelConfig | None:
    """The numbers of a folder that SGLang reads, with the fields that it was told to replace; None where they cannot be
    known."""
    if not (folder / "config.json").is_file():
        return None
    try:
        hf: Any = AutoConfig.from_pretrained(folder, local_files_only=True, **json.loads(overrides))
        return architecture_of(hf).model_config(hf)
    except (OSError, ValueError, TypeError, KeyError, ModelError):
        return None
