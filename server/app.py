"""The routes, and what they refuse: without the key, too much, too slowly."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime.generation import stop_list
from sequoia_plan.server.prompts import conversation, infill, prompts_of
from sequoia_plan.server.requests import Json, Request, read
from sequoia_plan.server.responses import CHAT, COMPLETION, NATIVE, Answer
from sequoia_plan.server.worker import Choice, Job, Worker

MAX_BODY, MAX_BODIES, BODY_SECONDS = 16 * 2**20, 64, 30
"""Bytes of a request; requests that are read at once; how long a client may take to send one."""
COMMENT_SECONDS = 5
"""A stream has a comment after so long without text, so that no one takes it for broken."""
GETS = "/health", "/v1/models", "/props", "/metrics"
TEXTS = "/tokenize", "/detokenize", "/apply-template"
SHAPES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SHAPES |= {"/completion": NATIVE, "/infill": NATIVE}


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


def app_of(server: Server, cors: str | None = None) -> Starlette:
    """The application; pages of the origin `cors` may ask it from a browser."""
    pool, bodies = ThreadPoolExecutor(1), asyncio.Semaphore(MAX_BODIES)

    async def prepared(http: HttpRequest, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` makes of a request's fields; it runs beside the thread of connections."""
        body = bytearray()
        try:
            async with bodies, asyncio.timeout(BODY_SECONDS):
                async for chunk in http.stream():
                    body += chunk
                    if len(body) > MAX_BODY:
                        raise HTTPException(413, f"body: more than {MAX_BODY} bytes")
        except TimeoutError as error:
            raise HTTPException(408, f"body: not sent in {BODY_SECONDS} seconds") from error
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: function(*arguments, read(body)))

    async def answer(http: HttpRequest) -> Response:
        """The answer to any request: a text, JSON, or a stream of events."""
        path, worker = http.url.path, server.worker
        given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if path != "/health" and server.key and not hmac.compare_digest(given, server.key.encode()):
            raise HTTPException(401, "Authorization: found no right key, expected Bearer KEY")
        if not worker:
            raise HTTPException(503, "Loading model")
        if http.method == "GET":
            return about(path, worker)
        if path not in SHAPES:  # one of TEXTS
            return JSONResponse(await prepared(http, text_of, path, worker))
        events, loop = asyncio.Queue[Any](), asyncio.get_running_loop()

        def emit(event: Any) -> None:
            """Hand an event over from the decoding thread."""
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = await prepared(http, job_of, path, server, emit)
        texts = Answer(SHAPES[path], job, worker.pair.tokenizer, worker.pair.target.name)
        worker.jobs.put(job)
        if job.request.stream:
            return StreamingResponse(stream(texts, events), media_type="text/event-stream")
        gone = asyncio.ensure_future(http.receive())
        gone.add_done_callback(lambda _: job.end())
        while event := await events.get():
            take(event)
        gone.cancel()
        return JSONResponse(texts.whole())

    origins: Json = {"allow_origins": [cors], "allow_methods": ["*"], "allow_headers": ["*"]}
    methods = {path: ["GET"] for path in GETS} | {path: ["POST"] for path in (*TEXTS, *SHAPES)}
    kinds = SequoiaPlanError, HTTPException, ClientDisconnect, InterruptedError, Exception
    return Starlette(
        routes=[Route(path, answer, methods=names) for path, names in methods.items()],
        middleware=[Middleware(CORSMiddleware, **origins)] if cors else [],
        exception_handlers=dict.fromkeys(kinds, refused),
    )


def take(event: Any) -> Choice:
    """The choice of an event that a job emitted, with what is new in it; raises an error."""
    if isinstance(event, Exception):
        raise event
    choice, choice.text, choice.result = event
    return choice


async def stream(texts: Answer, events: asyncio.Queue[Any]) -> AsyncIterator[str]:
    """The events of a stream as text, and comments while there are none."""
    job = texts.job
    try:
        while True:
            try:
                async with asyncio.timeout(COMMENT_SECONDS):
                    event = await events.get()
            except TimeoutError:
                yield ": the prompt is read, or others are answered\n\n"
                continue
            if event is None:
                break
            yield line(texts.chunk(take(event)))
        if job.request.stream_options.get("include_usage"):
            yield line(texts.common | {"choices": []} | texts.usage())
        if texts.shape != NATIVE:
            yield "data: [DONE]\n\n"
    except Exception as error:
        yield line(error_of(error))
    finally:
        job.is_over = True


def line(value: Json) -> str:
    """A value as one event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def about(path: str, worker: Worker) -> Response:
    """The answer to a GET: the server's state, models, settings or counts."""
    target, template = worker.pair.target, getattr(worker.pair.tokenizer, "chat_template", "")
    if path == "/metrics":
        totals = worker.totals.copy()
        return PlainTextResponse("".join(f"vllm:{name} {totals[name]}\n" for name in totals))
    model = {"id": target.name, "object": "model", "owned_by": "sequoia-plan", "created": 0}
    settings = {"params": worker.sampling.settings(), "n_ctx": target.context}
    answers: Json = {
        "/health": {"status": "ok"},
        "/v1/models": {"object": "list", "data": [model | {"meta": {"n_ctx": target.context}}]},
        "/props": {
            "default_generation_settings": settings, "total_slots": 1, "model_path": target.name,
            "chat_template": template, "modalities": {"vision": False, "audio": False},
        },
    }  # fmt: skip
    return JSONResponse(answers[path])


def text_of(path: str, worker: Worker, request: Request) -> Json:
    """Tokens of a text, text of tokens, or a conversation as text, by the path."""
    tokenizer = worker.pair.tokenizer
    if path == "/apply-template":
        return {"prompt": conversation(tokenizer, request)}
    if path == "/detokenize":
        check(request.tokens, len(request.tokens) + 1, len(tokenizer))
        return {"content": tokenizer.decode(request.tokens)}
    encoded = tokenizer(request.content, add_special_tokens=request.add_special)
    return {"tokens": encoded["input_ids"]}


def job_of(path: str, server: Server, emit: Callable[[Any], object], request: Request) -> Job:
    """The job of a request; ArgumentError if a value is wrong."""
    worker: Any = server.worker
    tokenizer, target = worker.pair.tokenizer, worker.pair.target
    text, own_text = request.prompt, str(request.prompt)
    if SHAPES[path] == CHAT:
        text = conversation(tokenizer, request)
    elif path == "/infill":
        prefix = request.input_prefix + own_text
        text = infill(tokenizer, prefix, request.input_suffix, request.input_extra)
    elif request.suffix is not None:
        text = infill(tokenizer, own_text, request.suffix, None)
    prompts = prompts_of(tokenizer, text)
    for prompt in prompts:
        check(prompt, target.context, target.num_embeddings)
    if request.logit_bias:
        check([*dict(request.logit_bias)], target.vocabulary, target.vocabulary)
    stop_list(request.stop, tokenizer)
    limits = request.max_completion_tokens, request.max_tokens, request.n_predict
    limit = max(limits) if max(limits) >= 0 else server.max_tokens
    repeated = [prompt for prompt in prompts for _ in range(request.n)]
    choices = [Choice(index, prompt) for index, prompt in enumerate(repeated)]
    sampling = request.sampling(worker.sampling)
    return Job(request, choices, limit, sampling, request.constraint(tokenizer), emit)


def check(tokens: Any, context: int, size: int) -> None:
    """Raise ArgumentError if token ids are not 0 to `size` - 1, or too many for `context`."""
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ArgumentError(f"prompt: found {tokens!r:.60}, expected a text or token ids")
    if not 0 < len(tokens) < context:
        raise ArgumentError(
            f"prompt: found {len(tokens)} tokens, expected 1 to {context - 1}, the model's context "
            "less one new token; shorten it"
        )
    if not 0 <= min(tokens) <= max(tokens) < size:
        raise ArgumentError(f"tokens: found {tokens!r:.60}, expected numbers from 0 to {size - 1}")


def error_of(error: Any) -> Json:
    """OpenAI's error object for an exception; its code is the HTTP status."""
    status = getattr(error, "status_code", 400 if isinstance(error, ArgumentError) else 503)
    message = getattr(error, "detail", str(error))
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = message.partition(":")[0]
    return {"error": {"message": message, "param": param, "code": status, "type": kind}}


def refused(http: Any, error: Any) -> Response:
    """The answer to a request that is refused."""
    body = error_of(error)
    return JSONResponse(body, body["error"]["code"])
