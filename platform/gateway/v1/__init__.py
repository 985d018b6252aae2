"""The OpenAI-compatible API on raw ASGI: routing, authentication, and the error shape for everything that goes wrong.

Refuses to know Django: no thread and no ORM call stands between a socket and the Bus.
"""

from __future__ import annotations

import time

from gateway import logs, metrics
from gateway.auth import Caller, key_of_request
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.runtime import Runtime
from gateway.tracing import tracing
from gateway.v1 import batches, chat, completions, files, idempotency, models, responses_http
from gateway.v1.http import Exchange, Receive, Scope, Send
from gateway.v1.routes import Call, Match, Route, find
from wire.bus import BusError

ROUTES = (
    Route("POST", "/v1/chat/completions", idempotency.once(chat.create)),
    Route("POST", "/v1/completions", idempotency.once(completions.create)),
    Route("POST", "/v1/responses", idempotency.once(responses_http.create)),
    Route("GET", "/v1/responses/*", responses_http.retrieve, reads_query=True),
    Route("DELETE", "/v1/responses/*", responses_http.delete),
    Route("POST", "/v1/responses/*/cancel", responses_http.cancel),
    Route("GET", "/v1/responses/*/input_items", responses_http.input_items, reads_query=True),
    *files.ROUTES,
    *batches.ROUTES,
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/**", models.get_model),
)
MAX_PATH_SHOWN = 200


async def application(runtime: Runtime, scope: Scope, receive: Receive, send: Send) -> None:
    """One request of /v1. What fails is answered in the OpenAI error shape, and then raised for the server's log."""
    exchange = Exchange(scope, receive, send)
    logs.bind(request_id=exchange.request_id)
    try:
        with tracing.request(exchange.method, exchange.path, exchange.headers, exchange.request_id):
            await _answer(exchange, runtime)
            _tell_trace(exchange)
    except Exception:
        if exchange.status is None:
            message = f"Something went wrong on our side; please quote {exchange.request_id}."
            await exchange.refuse(Refusal(reason=Reason.INTERNAL, message=message))
        raise
    finally:
        if exchange.status is not None:
            metrics.count_request(exchange.status, exchange.priority_class)
            _note(exchange)


def _tell_trace(exchange: Exchange) -> None:
    label = None if exchange.priority_class is None else exchange.priority_class.label
    tracing.say(http__response__status_code=exchange.status, rubato__class=label)


def _note(exchange: Exchange) -> None:
    """The answer in the log: never a query string, never a body."""
    priority_class = exchange.priority_class
    details = {
        "status": exchange.status,
        "ms": round((time.monotonic() - exchange.received_at_s) * 1_000),
        "priority_class": None if priority_class is None else priority_class.label,
    }
    logs.requests.info("%s %s", exchange.method, exchange.path[:MAX_PATH_SHOWN], extra=details)


async def _answer(exchange: Exchange, runtime: Runtime) -> None:
    try:
        await _serve(exchange, runtime)
    except InvalidRequest as error:
        exchange.priority_class = error.priority_class
        await exchange.refuse_unread(error.refusal, error.headers)
    except BusError as error:
        if exchange.status is not None:
            raise
        message = f"The platform's memory does not answer ({type(error).__name__}); please send the request again."
        await exchange.refuse(Refusal(reason=Reason.UNAVAILABLE, message=message))


async def _serve(exchange: Exchange, runtime: Runtime) -> None:
    found = find(ROUTES, exchange.method, exchange.path)
    if not isinstance(found, Match):
        if not found:
            raise invalid(Reason.ROUTE_NOT_FOUND, f"There is no {exchange.path[:MAX_PATH_SHOWN]} here.")
        refusal = Refusal(reason=Reason.METHOD_NOT_ALLOWED, message=f"Use {' or '.join(found)} here.")
        raise InvalidRequest(refusal, {"allow": ", ".join(found)})
    caller = await _authenticate(exchange, runtime)
    if not found.reads_query:
        exchange.query()
    await found.handler(Call(exchange, runtime, caller, found.arguments))


async def _authenticate(exchange: Exchange, runtime: Runtime) -> Caller:
    key = key_of_request(exchange.headers, exchange.scope["query_string"])
    caller = key if isinstance(key, Refusal) else await runtime.keys.authenticate(key)
    if isinstance(caller, Refusal):
        raise InvalidRequest(caller)
    exchange.sunset_at_s = caller.sunset_at_s
    logs.bind(tenant=caller.tenant_id)
    tracing.say(rubato__tenant=caller.tenant_id)
    return caller
