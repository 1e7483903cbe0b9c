"""A trained encoder over HTTP: POST /predict, /fill and /embed, GET /health, and a page to try it at /.

Bodies are JSON of bounded size and time. Nothing is written, and no file is named by a request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote

from overnight.engine.finite import NonFiniteError
from overnight.errors import ConfigError, DataError
from overnight.inference.embedding import check_embedding, embed_texts
from overnight.inference.model import Model
from overnight.inference.worker import Busy, Worker
from overnight.state_files import is_text, parse_json

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

    from overnight.inference.connections import Server, connection, listen
except ImportError:
    raise ConfigError("`overnight serve` needs the extra `serve`: pip install 'overnight[serve]'") from None

_LOCAL = ("127.0.0.1", "[::1]", "localhost")
_PATHS = "/, /health, /predict, /fill and /embed"
# For so long what is left of a body that is too large is read and dropped (s): most clients read an answer once they have sent all.
_REST = 1.0
_EMBED = {"pooling": "mean", "layer": -1, "normalize": False}
# The page needs nothing from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body_bytes: int = 1 << 20
    texts: int = 256
    body_seconds: float = 10.0
    """Within which a body has to arrive, and before it the headers."""
    waiting: int = 256
    """Requests in the queue; a further one is told to come again (503)."""


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _PlainPaths:
    """Take a whole address, `GET http://localhost/health`, which is mostly said to proxies, for its path, and its name for that of the host (RFC 9112, 3.2.2).

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if found := re.fullmatch(rb"https?://([^/]+)(/.*)?", scope.get("raw_path") or b"", re.IGNORECASE):
            name, path = found[1], found[2] or b"/"
            headers = [(b"host", name), *(header for header in scope["headers"] if header[0] != b"host")]
            scope = {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": headers}
        await self.app(scope, receive, send)


class _LocalNames:
    """Refuse requests to other names than this machine's, so that no page of elsewhere reaches it by a name of its own that leads here (DNS rebinding).

    Args:
        app: what answers the others, and those that name no host, which no browser sends.
        names: in lower case, of IPv6 in brackets.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if host and re.sub(r":\d+$", "", host).lower() not in self.names:
            why = f"{host} is not a local name of this machine; use {' or '.join(self.names)}, or listen on another address (--host)"
            await JSONResponse({"error": why}, 400)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _guards(host: str) -> list[Middleware]:
    """Return what stands before an application that listens on an address."""
    address = ip_address(host)
    if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
        return [Middleware(_PlainPaths)]
    return [
        Middleware(_PlainPaths),
        Middleware(_LocalNames, names=tuple(dict.fromkeys((*_LOCAL, f"[{host}]" if address.version == 6 else host)))),
    ]


def application(model: Model, host: str, limits: Limits) -> Starlette:
    """Return the application that answers for a model.

    Args:
        model: any trained encoder.
        host: the address on which it listens. On loopback only requests to a local name are answered.
        limits: of a request.

    Returns:
        the application; `state.asked` has the requests without an answer.
    """
    worker = Worker(lambda kind, texts: _answers(patient, kind, texts), limits.waiting)
    patient = replace(model, trained=replace(model.trained, between=worker.between))
    page = files("overnight.inference").joinpath("page.html").read_text(encoding="utf-8")
    asked: set[Request] = set()

    async def predict(request: Request) -> Response:
        fields = await _body(request, limits, ("texts",))
        await asyncio.to_thread(model.check, fields["texts"])
        return JSONResponse({"answers": await _wait(request, worker, "predict", fields["texts"])})

    async def fill(request: Request) -> Response:
        fields = await _body(request, limits, ("texts",))
        await asyncio.to_thread(model.check_fill, fields["texts"])
        return JSONResponse({"answers": await _wait(request, worker, "fill", fields["texts"])})

    async def embed(request: Request) -> Response:
        fields = await _body(request, limits, ("texts", *_EMBED))
        pooling, layer, normalize = (fields.get(name, default) for name, default in _EMBED.items())
        if not isinstance(pooling, str) or type(layer) is not int or not isinstance(normalize, bool):
            raise _Refused(400, "pooling is `mean` or `first`, layer a whole number, normalize true or false")
        check_embedding(model.trained, pooling, layer)
        if not all(isinstance(text, str) for text in fields["texts"]):
            raise _Refused(400, "texts: each must be a string")
        vectors = await _wait(request, worker, (pooling, layer, normalize), fields["texts"])
        return JSONResponse({"embeddings": [vector.tolist() for vector in vectors]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **_about(model), "waiting": worker.waiting()})

    async def home(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.stop)

    routes = [
        Route("/", home),
        Route("/health", health),
        Route("/predict", _counted(asked, predict), methods=["POST"]),
        Route("/fill", _counted(asked, fill), methods=["POST"]),
        Route("/embed", _counted(asked, embed), methods=["POST"]),
    ]
    handlers: Any = dict.fromkeys((_Refused, ConfigError, DataError, NonFiniteError, HTTPException), _refusal)
    app = Starlette(routes=routes, middleware=_guards(host), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False  # which `curl` does not follow, and then prints nothing
    app.state.asked = asked
    return app


def _about(model: Model) -> dict[str, Any]:
    """Return what a client, and above all the page, has to know of a model."""
    about: dict[str, Any] = {"kind": model.kind, "task": model.task, "labels": list(model.labels), "width": model.embedding_size}
    return about | {"pairs": model.trained.facts.get("pairs"), "fills": model.fills}


_Answer = Callable[[Request], Awaitable[Response]]


def _counted(asked: set[Request], answer: _Answer) -> _Answer:
    """Return an answer to requests that are among `asked` until they have it."""

    async def counted(request: Request) -> Response:
        asked.add(request)
        try:
            return await answer(request)
        finally:
            asked.discard(request)

    return counted


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # an unknown path, or another method
        path, by = request.url.path, (error.headers or {}).get("Allow", "")
        why = f"{path} takes {by}, not {request.method}" if by else f"there is no {path}; there are {_PATHS}"
        return JSONResponse({"error": why}, error.status_code, headers=error.headers)
    status = error.status if isinstance(error, _Refused) else 500 if isinstance(error, NonFiniteError) else 400
    # What is left of a body that was refused is not waited for.
    return JSONResponse({"error": str(error)}, status, headers={"Connection": "close"} if status in (408, 413) else None)


def _answers(model: Model, kind: Any, texts: list[Any]) -> list[Any]:
    if kind == "predict":
        return model.predict(texts)
    if kind == "fill":
        return model.fill_all(texts)
    return list(embed_texts(model.trained, texts, *kind))


async def _wait(request: Request, worker: Worker, kind: Any, texts: list[Any]) -> list[Any]:
    """Return the answers to a request; a client that leaves before takes it out of the queue.

    Raises:
        _Refused: 503 too many wait, 400 the client has left, which nobody reads.
    """
    try:
        waiting = worker.submit(kind, texts)
    except Busy:
        raise _Refused(503, "too many requests are waiting; try again later") from None
    answers, gone = asyncio.wrap_future(waiting), asyncio.ensure_future(_end(request))
    try:
        await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            return answers.result()
        raise _Refused(400, "the client has left")
    finally:
        gone.cancel()
        answers.cancel()  # whose error nobody would ask for
        waiting.cancel()


async def _end(request: Request) -> None:
    """Return when a client whose body is read leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of it")


_STRICT = json.JSONDecoder(parse_constant=_no_number)


async def _body(request: Request, limits: Limits, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Return the object of a body, with a list of `texts`.

    Raises:
        _Refused: 413 too large, 408 too slow, 400 no such JSON.
    """
    too_large = _Refused(413, f"the body has more than {limits.body_bytes:,} bytes")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limits.body_bytes and "expect" in request.headers:  # it has sent none of it yet
        raise too_large
    content, loop = bytearray(), asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limits.body_seconds) as end:
            async for chunk in request.stream():
                if len(content) <= limits.body_bytes:
                    content += chunk
                    if len(content) > limits.body_bytes:
                        end.reschedule(min(end.when() or 0.0, loop.time() + _REST))
    except TimeoutError:
        if len(content) > limits.body_bytes:
            raise too_large from None
        raise _Refused(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    except ClientDisconnect:
        raise _Refused(400, "the body ended before its length") from None
    if len(content) > limits.body_bytes:
        raise too_large
    try:
        text = content.decode().removeprefix("\ufeff")  # which some clients on Windows put first
        fields = parse_json(text, _STRICT)
    except UnicodeDecodeError as error:
        raise _Refused(400, f"the body is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise _Refused(400, f"the body is not JSON ({error})") from None
    # Before all that an answer would quote, which is to be written as UTF-8.
    if "\\ud" in text.lower() and not is_text(json.dumps(fields, ensure_ascii=False)):
        raise _Refused(400, "half of a surrogate pair is no character")
    if not isinstance(fields, dict) or not isinstance(fields.get("texts"), list) or not fields["texts"]:
        raise _Refused(400, 'the body must be an object with a list of texts: {"texts": ["one", "two"]}')
    if unknown := sorted(fields.keys() - set(allowed)):
        raise _Refused(400, f"{unknown[0]}: is not known here; there are {', '.join(allowed)}")
    if len(fields["texts"]) > limits.texts:
        raise _Refused(413, f"{len(fields['texts']):,} texts; at most {limits.texts} at once")
    return fields


def serve(model: Model, host: str, port: int, limits: Limits) -> None:
    """Answer requests until SIGTERM or Ctrl-C; what is under way then is still answered.

    Args:
        model: any trained encoder.
        host: to listen on.
        port: 0 is any that is free.
        limits: of a request.

    Raises:
        ConfigError: the port is taken, or the host is none of this machine.
    """
    listening = listen(host, port, limits.waiting)
    name, number = listening.getsockname()[:2]
    app = application(model, name, limits)
    config = uvicorn.Config(
        app,
        http=connection(limits.body_seconds),
        log_level="error",  # its warnings are of requests that are none, without saying whose, and of what this server does not offer
        timeout_keep_alive=30,  # who reads what came asks again by the same connection; open ones count as requests (limit_concurrency)
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=4 * limits.waiting,
        timeout_graceful_shutdown=10,
        ws="none",
    )
    print(f"serving on http://{f'[{name}]' if ':' in name else name}:{number} (Ctrl-C ends it)", flush=True)
    with listening:
        Server(config, lambda: bool(app.state.asked)).run([listening])
    print("stopped", flush=True)
