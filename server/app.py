"""The routes, and what they refuse: without the key, too much, too slowly."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.text import text_ids
from sequoia_plan.server.prompts import conversation, infill, prompts_of
from sequoia_plan.server.requests import Refusal, Request, read
from sequoia_plan.server.responses import CHAT, COMPLETION, NATIVE, Answer
from sequoia_plan.server.worker import Job, Worker

MAX_BODY = 16 * 2**20
MAX_BODIES = 4 * MAX_BODY
"""Bytes of a request, and of all that are being read."""
BODY_SECONDS = 30.0
"""A client must have sent its request within this time."""
COMMENT_SECONDS = 5.0
"""A stream has a comment after so long without text, so that no one takes it for broken."""
T = TypeVar("T")


@dataclass
class Server:
    """What the routes share.

    Args:
        key: what clients must know; None for no key.
        max_tokens: new tokens of a request that names no number.
        worker: what decodes; None while models are loaded.
    """

    key: str | None = None
    max_tokens: int = 2048
    worker: Worker | None = None
    bytes_read: int = 0
    pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    """Reads requests one after the other, beside the thread of the connections."""

    @property
    def ready_worker(self) -> Worker:
        """The worker; Refusal while models are loaded."""
        if self.worker is None:
            raise Refusal("Loading model", 503)
        return self.worker

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.ready_worker.pair.target.name)

    def check_key(self, request: HttpRequest) -> None:
        """Raise Refusal if a request has not the key."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key", given)
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise Refusal("Invalid API Key: send the header Authorization: Bearer KEY", 401)

    async def body(self, request: HttpRequest) -> bytes:
        """The body of a request; Refusal if it is too large, or comes too slowly."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    self.bytes_read += len(part)
                    if size > MAX_BODY:
                        raise Refusal(f"body: more than {MAX_BODY} bytes, expected fewer", 413)
                    if self.bytes_read > MAX_BODIES:
                        raise Refusal("body: too many large requests at once; try again", 503)
                    parts.append(part)
        except TimeoutError as error:
            raise Refusal(f"body: not complete after {BODY_SECONDS:g} seconds", 408) from error
        finally:
            self.bytes_read -= size
        return b"".join(parts)

    async def parsed(self, request: HttpRequest) -> Request:
        """The fields of a request."""
        return await self.aside(read, await self.body(request))

    async def aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns, which is called beside the thread of the connections."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    def job(self, shape: str, path: str, request: Request, emit: Callable[[Any], None]) -> Job:
        """The job of a request; raises ArgumentError for a wrong value."""
        worker = self.ready_worker
        tokenizer, target = worker.pair.tokenizer, worker.pair.target
        if shape == CHAT:
            text = conversation(tokenizer, request)
            prompts = [list(tokenizer(text, add_special_tokens=False)["input_ids"])]
        elif path == "/infill":
            middle = request.prompt if isinstance(request.prompt, str) else ""
            prefix, suffix = request.input_prefix, request.input_suffix
            prompts = [infill(tokenizer, prefix, suffix, middle, request.input_extra)]
        elif request.suffix is not None and isinstance(request.prompt, str):
            prompts = [infill(tokenizer, request.prompt, request.suffix)]
        else:
            prompts = prompts_of(tokenizer, request.prompt)
        for prompt in prompts:
            _check_prompt(prompt, target.context, target.num_embeddings)
        if any(not 0 <= token < target.vocabulary for token in dict(request.logit_bias)):
            found = f"found {request.logit_bias!r:.60}"
            raise Refusal(f"logit_bias: {found}, expected tokens below {target.vocabulary}")
        limit = self.max_tokens if request.limit in (None, -1) else request.limit
        sampling = request.sampling(worker.sampling)
        constraint = request.constraint(tokenizer)
        choices = [prompt for prompt in prompts for _ in range(request.n)]
        return Job(request, choices, limit or 0, sampling, constraint, emit)

    async def complete(self, shape: str, http: HttpRequest) -> Response:
        """Decode: an answer, or a stream of its chunks."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def emit(event: Any) -> None:
            """Hand an event over from the decoding thread."""
            loop.call_soon_threadsafe(events.put_nowait, event)

        worker, request = self.ready_worker, await self.parsed(http)
        job = await self.aside(self.job, shape, http.url.path, request, emit)
        answer = Answer(shape, job, worker.pair.tokenizer, self.model)
        worker.jobs.put(job)
        if request.stream:
            return StreamingResponse(_stream(job, answer, events), media_type="text/event-stream")
        gone = asyncio.create_task(_until_gone(http, job))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Refusal):
                    raise event
                list(answer.add(event))
        finally:
            gone.cancel()
            job.cancelled = True
        return JSONResponse(answer.whole())


def _check_prompt(prompt: list[int], context: int, num_tokens: int) -> None:
    """Raise Refusal for token ids that the model cannot read."""
    if not prompt:
        raise Refusal("prompt: found no token, expected at least one", field="prompt")
    if len(prompt) >= context:
        raise Refusal(
            f"prompt: found {len(prompt)} tokens, expected at most {context - 1}, the model's "
            "context less one new token; shorten it",
            field="prompt",
        )
    if not 0 <= min(prompt) <= max(prompt) < num_tokens:
        raise Refusal(f"prompt: expected tokens from 0 to {num_tokens - 1}", field="prompt")


async def _until_gone(http: HttpRequest, job: Job) -> None:
    """Cancel a job when its client goes away."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    job.cancelled = True


async def _stream(job: Job, answer: Answer, events: asyncio.Queue[Any]) -> AsyncIterator[str]:
    """The events of a stream, and comments while there are none."""
    try:
        while True:
            try:
                event = await asyncio.wait_for(events.get(), COMMENT_SECONDS)
            except TimeoutError:
                yield ": waiting\n\n"
                continue
            if event is None:
                break
            if isinstance(event, Refusal):
                yield _event({"error": _error(event)})
                break
            for chunk in answer.add(event):
                yield _event(chunk)
        if answer.shape != NATIVE:
            yield "data: [DONE]\n\n"
    finally:
        job.cancelled = True


def _event(chunk: Any) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def _error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}
    return {
        "message": str(refusal), "type": kinds.get(refusal.status, "invalid_request_error"),
        "param": refusal.field, "code": refusal.status,
    }  # fmt: skip


def refused(http: Any, error: Any) -> Response:
    """The answer to a request that is refused."""
    if isinstance(error, HTTPException):  # a path or a method that there is not
        error = Refusal(f"{http.method} {http.url.path}: {error.detail}", error.status_code)
    elif not isinstance(error, Refusal):
        error = Refusal(str(error), field=str(error).partition(":")[0])
    return JSONResponse({"error": _error(error)}, error.status)


def health(server: Server) -> Response:
    """Whether models are loaded."""
    assert server.ready_worker
    return JSONResponse({"status": "ok"})


def models(server: Server) -> Response:
    """The one model."""
    target = server.ready_worker.pair.target
    about = {"n_ctx": target.context, "n_ctx_train": target.context, "n_vocab": target.vocabulary}
    entry = {"id": server.model, "object": "model", "created": int(time.time())}
    entry |= {"owned_by": "sequoia-plan", "meta": about}
    named = {"name": server.model, "model": server.model, "type": "model"}
    return JSONResponse({"object": "list", "data": [entry], "models": [named]})


def props(server: Server) -> Response:
    """What llama-server says of itself; without its `build_info`, which is another program's."""
    worker = server.ready_worker
    tokenizer, context = worker.pair.tokenizer, worker.pair.target.context
    params = worker.sampling.settings() | {"n_predict": server.max_tokens}
    return JSONResponse(
        {
            "default_generation_settings": {"params": params, "n_ctx": context},
            "total_slots": 1,
            "model_alias": server.model,
            "model_path": server.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": getattr(tokenizer, "chat_template", None) or "",
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
        }  # fmt: skip
    )


def metrics(server: Server) -> Response:
    """Counters by vLLM's names."""
    totals, label = server.ready_worker.totals.copy(), f'{{model_name="{server.model}"}}'
    steps, seconds = totals.pop("steps", 0), totals.pop("seconds", 0)
    lines = [f"vllm:inter_token_latency_seconds_count{label} {steps}"]
    lines += [f"vllm:inter_token_latency_seconds_sum{label} {seconds:.6f}"]
    for name, count in totals.items():
        if isinstance(name, int):
            position = f'{{model_name="{server.model}",position="{name}"}}'
            name, labels = "spec_decode_num_accepted_tokens_per_pos", position
        else:
            labels = label
        lines.append(f"vllm:{name}_total{labels} {count}")
    return PlainTextResponse("\n".join(lines) + "\n")


def tokenize(server: Server, request: Request) -> dict[str, Any]:
    """Text -> token ids."""
    tokenizer = server.ready_worker.pair.tokenizer
    ids: Any = tokenizer(request.content, add_special_tokens=False)["input_ids"]
    if request.add_special:
        ids = text_ids(tokenizer, request.content)
    if request.with_pieces:
        ids = [{"id": token, "piece": tokenizer.decode([token])} for token in ids]
    return {"tokens": ids}


def detokenize(server: Server, request: Request) -> dict[str, Any]:
    """Token ids -> text."""
    tokenizer = server.ready_worker.pair.tokenizer
    if any(not 0 <= token < len(tokenizer) for token in request.tokens):
        raise Refusal(f"tokens: expected numbers from 0 to {len(tokenizer) - 1}", field="tokens")
    return {"content": tokenizer.decode(request.tokens)}


def apply_template(server: Server, request: Request) -> dict[str, Any]:
    """A conversation -> the text that the model reads."""
    return {"prompt": conversation(server.ready_worker.pair.tokenizer, request)}


GETS = {"/health": health, "/v1/models": models, "/props": props, "/metrics": metrics}
TEXTS = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template}
SHAPES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SHAPES |= {"/completion": NATIVE, "/infill": NATIVE}


def app_of(server: Server, cors: str | None = None) -> Starlette:
    """The application: its routes; pages of the origin `cors` may ask it."""

    async def answer(http: HttpRequest) -> Response:
        path = http.url.path
        if path != "/health":
            server.check_key(http)
        if path in GETS:
            return GETS[path](server)
        if path in SHAPES:
            return await server.complete(SHAPES[path], http)
        request = await server.parsed(http)
        return JSONResponse(await server.aside(TEXTS[path], server, request))

    async def gone(http: HttpRequest, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    origins = {"allow_origins": [cors], "allow_methods": ["*"], "allow_headers": ["*"]}
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["GET"]) for path in GETS),
            *(Route(path, answer, methods=["POST"]) for path in (*TEXTS, *SHAPES)),
        ],
        middleware=[Middleware(CORSMiddleware, **origins)] if cors else [],
        exception_handlers={
            ArgumentError: refused, HTTPException: refused, ClientDisconnect: gone,
        },
    )  # fmt: skip
