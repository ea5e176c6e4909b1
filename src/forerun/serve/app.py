"""The HTTP API: routes, and nothing that knows the engine."""

import base64
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from forerun import __version__
from forerun.engine import Logprob
from forerun.errors import ForerunError
from forerun.model import Model
from forerun.serve.answers import Answer
from forerun.serve.config import Config
from forerun.serve.errors import ApiError, bad
from forerun.serve.guards import FAILED, Guard, error_response
from forerun.serve.metrics import CONTENT_TYPE, Metrics
from forerun.serve.plans import AnswerPlan, Planner
from forerun.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from forerun.serve.responses import NAMES, ResponseAnswer, ResponseRequest
from forerun.serve.streaming import EventStream, Gone, dumps, with_client
from forerun.serve.structure import Structures
from forerun.serve.texts import Texts
from forerun.serve.tools import calling
from forerun.serve.worker import Reply, Worker

log = logging.getLogger("forerun.serve")


_SHAPE = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
_SCHEMA = {"type": "object", "properties": {"error": {"type": "object", "properties": _SHAPE}}}
ERROR: dict[str, Any] = {
    "description": "What was wrong.", "content": {"application/json": {"schema": _SCHEMA}}
}  # fmt: skip
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}
ERRORS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 413, 429, 500, 501, 503), ERROR
)


class Server:
    """One model behind HTTP: what the routes share."""

    def __init__(self, model: Model, config: Config) -> None:
        self.config, self.began = config, int(time.time())
        self.vocab_size = model.target.vocab_size
        self.texts = Texts(model.tokenizer)
        self.tokens = Texts(model.tokenizer)
        """For who wants tokens and nothing else, of texts of any length: nobody waits for them."""
        self.planner = Planner(config, model, self.texts)
        self.structures = Structures(model.tokenizer, self.vocab_size, model.eos)
        self.metrics = Metrics(config.metrics_prefix, config.name)
        self.worker = Worker(model, config, self.metrics.update)

    # --- generating -------------------------------------------------------------------------

    async def plan_chat(self, body: ChatRequest) -> AnswerPlan:
        may_call = calling(body, self.texts.calls, self.texts.added)
        grammar = may_call.grammar() if may_call else None
        constraint = await self.structures.of(body, grammar)
        return await self.texts.run(self.planner.chat, body, constraint, may_call)

    async def generate(
        self, request: Request, plan: AnswerPlan, asked: ResponseRequest | None = None
    ) -> Response:
        """Answer a plan, whole or streamed; as a response where one was `asked` for.

        Raises:
            ApiError, ForerunError: what was wrong.
            Gone: the client left.
        """
        read: list[Sequence[Logprob]] = []
        if plan.writes:
            self.worker.check(plan.jobs)
        if plan.echo and plan.top is not None:
            read = await with_client(request, self.worker.score(plan.prompts, plan.top))
        reply = (self.worker.open if plan.writes else self.worker.answer_empty)(plan.jobs)
        chat = Answer(plan, self.config.name, self.texts, read)
        answer = chat if asked is None else ResponseAnswer(chat, asked)
        if plan.request.stream:
            return EventStream(self._frames(answer, reply), reply.slow)
        try:
            body = await with_client(request, self._whole(answer, reply))
            return Response(body, media_type="application/json")
        finally:
            reply.cancel()

    async def _whole(self, answer: Answer | ResponseAnswer, reply: Reply) -> bytes:
        async for updates in reply.updates():
            for update in updates:
                answer.take(update)
        return await self.texts.run(lambda: dumps(answer.whole()))  # it may be long

    async def _frames(self, answer: Answer | ResponseAnswer, reply: Reply) -> AsyncGenerator[bytes]:
        try:
            if opening := answer.opening():
                yield opening
            async for updates in reply.updates():
                if written := b"".join(map(answer.frame, updates)):
                    yield written
            yield answer.closing()
        except ForerunError as error:
            yield answer.error(api_error(error))
        except Exception:
            log.exception("a stream failed")
            yield answer.error(ApiError(500, FAILED))
        finally:
            if reply.slow.is_set():
                self.metrics.gone["slow_reader"].inc()
            elif reply.open:
                self.metrics.gone["disconnected"].inc()
            reply.cancel()

    # --- describing -------------------------------------------------------------------------

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.config.name,
            "object": "model",
            "created": self.began,
            "owned_by": "forerun",
            "max_model_len": self.planner.limit,
            "meta": {
                "vocab_size": self.vocab_size,
                "sampling_defaults": self.planner.defaults,
                **self.planner.default_policy.to_json(),
            },
        }

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model; none or an empty name means this one."""
        if name and name != self.config.name:
            other = f"no model {name!r:.100} here; this server has {self.config.name!r}"
            raise ApiError(404, other, "model", "model_not_found")


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page at `/`, and headers that let it load only itself, by the hashes of its parts."""
    text = files("forerun.serve").joinpath("page.html").read_text(encoding="utf-8")
    scripts, styles = _hashes(text, "script"), _hashes(text, "style")
    nothing = "".join(f"{what} 'none'; " for what in ("default-src", "base-uri", "form-action"))
    own = f"script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:"
    return text, {
        "content-security-policy": f"{nothing}{own}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hashes(text: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies]
    return " ".join(f"'sha256-{d}'" for d in digests) or "'none'"


def api_error(error: Exception) -> ApiError:
    """Any error of forerun's, as a client is told it."""
    return error if isinstance(error, ApiError) else bad(str(error))


def create_app(model: Model, config: Config) -> tuple[ASGIApp, Server]:
    """The application and what stands behind it."""
    server = Server(model, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        yield
        await server.worker.stop()
        server.texts.close()
        server.tokens.close()
        server.structures.close()

    app = FastAPI(
        title="forerun",
        version=__version__,
        description="OpenAI-compatible, with speculation per request.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _errors(app, server)
    _generation(app, server)
    _tokens(app, server)
    _about(app, server)
    guarded: ASGIApp = Guard(app, config, lambda reason: server.metrics.refused[reason].inc())
    if config.origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=config.origins, allow_methods=["*"], allow_headers=["*"]
        )
    return guarded, server


def _errors(app: FastAPI, server: Server) -> None:
    words = {429: "queue_full", 503: "shutting_down", 403: "unauthorized"}

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, Gone):
            server.metrics.gone["disconnected"].inc()
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, RequestValidationError):
            error = _validation(error)
        elif isinstance(error, HTTPException):
            missing = f"no such path: {request.url.path!r:.100}"
            message = missing if error.status_code == 404 else str(error.detail)
            error = ApiError(error.status_code, message)
        elif not isinstance(error, ForerunError):
            return error_response(ApiError(500, FAILED))
        answer = api_error(error)
        server.metrics.refused[words.get(answer.status, "invalid")].inc()
        return error_response(answer)

    for kind in (ForerunError, RequestValidationError, HTTPException, Gone, Exception):
        app.add_exception_handler(kind, failed)


def _validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its field."""
    problems = error.errors()
    # Of a field that may be of several kinds, the kind that came furthest is meant.
    same = [p for p in problems if p["loc"][:2] == problems[0]["loc"][:2]]
    first = max(same, key=lambda problem: len(problem["loc"]))
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", ""))
        return bad(f"the body is not JSON: {reason}")
    if not place:
        return bad("the body must be a JSON object, sent as content-type application/json")
    field = place[0]
    if field == "prompt" and first["type"] != "missing":
        return bad(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            "lists, none of them empty",
            "prompt",
        )
    message = str(first["msg"])
    value = "" if first["type"] == "missing" else f", got {first.get('input')!r:.60}"
    where = field if len(place) == 1 else f"{field} ({'.'.join(place[1:])})"
    return bad(f"{where}: {message[:1].lower()}{message[1:]}{value}", field)


def _generation(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=ERRORS | STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        server.check_model(body.model)
        constraint = await server.structures.of(body)
        plan = await server.texts.run(server.planner.completion, body, constraint)
        return await server.generate(request, plan)

    @app.post("/v1/chat/completions", responses=ERRORS | STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a conversation."""
        server.check_model(body.model)
        return await server.generate(request, await server.plan_chat(body))

    @app.post("/v1/responses", responses=ERRORS | STREAMED)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answer the last item of a conversation; nothing of it is kept."""
        server.check_model(body.model)
        try:
            plan = await server.plan_chat(body.chat())
        except ApiError as error:
            error.param = NAMES.get(error.param or "", error.param)
            raise
        return await server.generate(request, plan, body)

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """The one model there is."""
        return {"object": "list", "data": [server.model_card()]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """The one model, by its name."""
        server.check_model(name)
        return server.model_card()


def _tokens(app: FastAPI, server: Server) -> None:
    texts = server.tokens

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of messages."""
        server.check_model(body.model)
        given = [v for v in (body.prompt, body.content, body.messages) if v is not None]
        if len(given) != 1:
            raise bad("give one of prompt, content or messages", "prompt")
        if body.messages is not None:
            turns = [message.plain() for message in body.messages]
            start = body.add_generation_prompt is not False
            tokens = await texts.run(partial(texts.chat, turns, answer=start))
        else:
            special = body.add_special_tokens is not False
            tokens = await texts.run(texts.encode, str(given[0]), special)
        out = {"count": len(tokens), "max_model_len": server.planner.limit, "tokens": tokens}
        names = await texts.run(texts.names, tokens) if body.return_token_strs else None
        return await written(out | {"token_strs": names})

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        server.check_model(body.model)
        most = max(body.tokens, default=0)
        if most >= (size := server.vocab_size):
            raise bad(f"token id {most} is outside the vocabulary of {size}", "tokens")
        return await written({"prompt": await texts.run(texts.decode, body.tokens, False)})

    async def written(value: dict[str, Any]) -> Response:
        return Response(await texts.run(dumps, value), media_type="application/json")

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """What evaluation tools ask: special tokens and the template."""
        return await texts.run(texts.info)


def _about(app: FastAPI, server: Server) -> None:
    @app.get("/health", responses={503: ERROR})
    async def health() -> dict[str, str]:
        """200 while requests are taken."""
        if server.worker.draining or not server.worker.alive:
            state = "shutting down" if server.worker.draining else "the engine is not running"
            raise ApiError(503, state)
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Of forerun."""
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(server.metrics.text(server.worker), media_type=CONTENT_TYPE)

    @app.get("/forerun/parts", responses=ERRORS)
    async def available() -> dict[str, Any]:
        """Controllers and rules a request may name; what the page needs to know."""
        return {
            "model": server.config.name,
            "max_model_len": server.planner.limit,
            "chat": server.texts.chats,
            "sampling_defaults": server.planner.defaults,
            **server.planner.parts(),
        }

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        """The page."""
        text, headers = _page()
        return HTMLResponse(text, headers=headers)
