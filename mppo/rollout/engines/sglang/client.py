"""One SGLang server over HTTP: what it is asked, and what its answers mean."""

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from mppo.batch.trajectory import Span, Status
from mppo.errors import EngineError
from mppo.rollout.engines.contract import Completion, Request, SamplingParams

FOREVER = math.inf
IDLE_S = 2.0
"""Seconds after which a silent connection is not used again: a server closes it after 5, and a request that meets that
would be lost."""
REFUSALS = (400, 401, 403, 404, 413, 422)
"""Of HTTP: the fault lies with the question."""
CONNECT_S = 10.0
TRIES = 3
"""Of a connection that could not be made: nothing was asked by then, so nothing can be answered twice."""


class ServerGone(EngineError):
    """A server cannot be reached, broke off, or answered what is no answer: others may be asked instead."""


class ServerRefuses(ServerGone):
    """It says that what it was asked is wrong: another would say so too."""


class SglangClient:
    """Of one server. All calls come from one event loop."""

    def __init__(self, url: str, api_key: str | None = None, control_s: float = 60.0, connections: int = 256):
        """A call of control may take `control_s` seconds where it says no other; requests over `connections` wait."""
        self.url, self.control_s = url.rstrip("/"), control_s
        self.host = urlsplit(url).hostname or ""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=IDLE_S),
            timeout=httpx.Timeout(control_s, connect=CONNECT_S, pool=None),
        )

    async def generate(self, request: Request, name: str, salt: str) -> Completion:
        """Continue a prompt under the request id `name`; `salt` keeps the prefix caches of different weights apart.

        Raises ServerGone. It has no deadline of its own: whoever asks aborts it by its name, and then it comes with
        what was written of it.
        """
        over_kept = request.params.leaves_tokens_out
        body = request_fields(request, name, salt) | {"return_sampling_mask": over_kept}
        return completion(await self.post("/generate", body, FOREVER), over_kept)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """What the server answers, as JSON or text. Raises ServerGone, with its words where it refuses."""
        return await self._ask("POST", path, timeout_s, json=dict(body or {}))

    async def succeed(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> None:
        """Raises ServerGone, with its words, also where it answers that it did not do it."""
        answer = await self.post(path, body, timeout_s)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerGone(f"{self.url}{path}: {answer.get('message') if isinstance(answer, dict) else answer!r}")

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._ask("GET", path, timeout_s)

    async def _ask(self, method: str, path: str, timeout_s: float | None, **content: Any) -> Any:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((httpx.ConnectError, httpx.ConnectTimeout)),
            stop=stop_after_attempt(TRIES),
            wait=wait_exponential_jitter(initial=0.2, max=2.0),
            reraise=True,
        )
        seconds = None if timeout_s == FOREVER else timeout_s or self.control_s
        timeout = httpx.Timeout(seconds, connect=CONNECT_S, pool=None)
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await self._http.request(method, path, timeout=timeout, **content)
        except httpx.HTTPError as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if answer.status_code >= 400:
            kind = ServerRefuses if answer.status_code in REFUSALS else ServerGone
            raise kind(f"{self.url}{path} refused: {answer.status_code} {answer.text[:500]}")
        return _content(answer)

    async def weight_version(self) -> str:
        """What it says of its weights. Raises ServerGone."""
        told = await self.get("/model_info")
        if not isinstance(told, dict) or "weight_version" not in told:
            raise ServerGone(f"{self.url}/model_info says nothing of a weight_version: {told!r}")
        return str(told["weight_version"])

    async def close(self) -> None:
        await self._http.aclose()


def _content(answer: httpx.Response) -> Any:
    if "json" not in answer.headers.get("content-type", ""):
        return answer.text
    try:
        return answer.json()
    except ValueError as error:
        raise ServerGone(f"{answer.url} answered what is no JSON: {answer.text[:200]!r}") from error


def request_fields(request: Request, name: str, salt: str) -> dict[str, Any]:
    """The body of `/generate`."""
    return {
        "rid": name,
        "input_ids": list(request.prompt_ids),
        "sampling_params": sampling_fields(request.params),
        "return_logprob": True,
        "logprob_start_len": -1,
        "cache_salt": salt,
    }


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """In SGLang's words, whose `top_k` of -1 is all."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "ignore_eos": params.ignore_eos,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def completion(answer: Any, over_kept: bool = False) -> Completion:
    """From the JSON of `/generate`; with `over_kept` its log-probs are over what top-p and top-k kept.

    Raises ServerGone for one that is no whole answer.
    """
    try:
        meta = answer["meta_info"]
        ids = tuple(map(_token, answer["output_ids"]))
        of_all = [entry[0] for entry in meta["output_token_logprobs"]]
        log_probs = tuple(map(float, meta["output_token_sampling_logprobs"] if over_kept and ids else of_all))
        whole = {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        spans = tuple(_span(told) for told in meta.get("weight_versions") or [whole] if told["end"] > told["start"])
        finish = meta["finish_reason"]["type"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerGone(f"an answer without what was asked for: {type(error).__name__}: {error}") from error
    if len(ids) != len(log_probs) or not all(map(math.isfinite, log_probs)):
        raise ServerGone(f"an answer of {len(ids)} tokens with the log-probs {log_probs}")
    if [p for span in spans for p in range(span.start, span.stop)] != list(range(len(ids))):
        raise ServerGone(f"an answer of {len(ids)} tokens, of which weights wrote {spans}")
    status = {"stop": Status.FINISHED, "length": Status.TRUNCATED}.get(finish, Status.ABORTED)
    return Completion(ids, log_probs, spans, status)


def _token(told: Any) -> int:
    if type(told) is not int or told < 0:
        raise ValueError(f"{told!r} is no token")
    return told


def _span(told: Mapping[str, Any]) -> Span:
    return Span(told["start"], told["end"], int(told["version"]))
