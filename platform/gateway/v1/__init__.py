"""The OpenAI-compatible API on raw ASGI: routing, authentication, and the error shape for everything that goes wrong.

Refuses to know Django: no thread and no ORM call stands between a socket and the Bus.
"""

from __future__ import annotations

from gateway import metrics
from gateway.auth import Caller, key_of_request
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.runtime import Runtime
from gateway.v1 import batches, chat, files, models
from gateway.v1.archive import Methods
from gateway.v1.http import Exchange, Receive, Scope, Send

_METHODS = {"/v1/chat/completions": "POST", "/v1/models": "GET"}
_MODEL_PREFIX = "/v1/models/"


async def application(runtime: Runtime, scope: Scope, receive: Receive, send: Send) -> None:
    """One request of /v1. What fails is answered in the OpenAI error shape, and then raised for the server's log."""
    exchange = Exchange(scope, receive, send)
    try:
        await _answer(exchange, runtime)
    except Exception:
        if exchange.status is None:
            message = f"Something went wrong on our side; please quote {exchange.request_id}."
            await exchange.refuse(Refusal(reason=Reason.INTERNAL, message=message))
        raise
    finally:
        if exchange.status is not None:
            metrics.count_request(exchange.status, exchange.priority_class)


async def _answer(exchange: Exchange, runtime: Runtime) -> None:
    try:
        await _serve(exchange, runtime)
    except InvalidRequest as error:
        await exchange.discard_body()
        await exchange.refuse(error.refusal)


async def _serve(exchange: Exchange, runtime: Runtime) -> None:
    path = exchange.path
    if (methods := files.methods_of(path) or batches.methods_of(path)) is not None:
        await _serve_archive(exchange, runtime, methods)
        return
    method = "GET" if path.startswith(_MODEL_PREFIX) else _METHODS.get(path)
    if method is None:
        raise invalid(Reason.ROUTE_NOT_FOUND, f"There is no {path[:200]} here.")
    if exchange.method != method:
        refusal = Refusal(reason=Reason.METHOD_NOT_ALLOWED, message=f"Use {method} here.")
        await exchange.refuse(refusal, {"allow": method})
        return
    caller = await _authenticate(exchange, runtime)
    if path == "/v1/chat/completions":
        body = await exchange.json_body(runtime.body_limit_bytes)
        await chat.handle(exchange, runtime.door, caller, body)
    elif path == "/v1/models":
        await models.list_models(exchange, runtime.door, caller)
    else:
        await models.get_model(exchange, runtime.door, caller, path.removeprefix(_MODEL_PREFIX))


async def _serve_archive(exchange: Exchange, runtime: Runtime, methods: Methods) -> None:
    """Files and batches: not on the way of a token."""
    handle = methods.get(exchange.method)
    if handle is None:
        allowed = ", ".join(sorted(methods))
        refusal = Refusal(reason=Reason.METHOD_NOT_ALLOWED, message=f"Use {allowed} here.")
        await exchange.refuse(refusal, {"allow": allowed})
        return
    caller = await _authenticate(exchange, runtime)
    if runtime.archive is None:
        raise invalid(Reason.UNAVAILABLE, "This gateway keeps no files.")
    await handle(exchange, runtime.archive, caller)


async def _authenticate(exchange: Exchange, runtime: Runtime) -> Caller:
    key = key_of_request(exchange.headers, exchange.scope["query_string"])
    caller = key if isinstance(key, Refusal) else await runtime.keys.authenticate(key)
    if isinstance(caller, Refusal):
        raise InvalidRequest(caller)
    exchange.sunset_at_s = caller.sunset_at_s
    return caller
