"""/v1/batches: create, list, show, cancel.

Knows the OpenAI batch shape; refuses to know how lines are checked (Celery) and driven (``run_batches``).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from django.db import OperationalError
from msgspec import Meta, Struct

from gateway.auth import Caller
from gateway.batches import ids, selectors, services, wishes
from gateway.batches.archive import Archive
from gateway.batches.models import Batch
from gateway.batches.services import FILE_LIFETIME_S, NoSuchObject, SentBefore, TooManyOpenBatches, WrongState
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1 import idempotency
from gateway.v1.archive import (
    after_of,
    encode,
    limit_of,
    listed,
    not_found,
    owner_of,
    route,
    seconds,
)
from gateway.v1.decoding import decode
from gateway.v1.http import Exchange

MAX_PAGE = 100
BODY_BYTES = 65_536
MAX_PAIRS = 16
_MOMENTS = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Lifetime(Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3_600, le=2_592_000)]


class BatchCreate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: Annotated[str, Meta(max_length=128)]
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: Lifetime | None = None


_decoder = msgspec.json.Decoder(BatchCreate)


def shown(batch: Batch) -> dict[str, Any]:
    def file_id(found: UUID | None) -> str | None:
        return None if found is None else ids.shown(ids.FILE, found)

    return {
        "id": ids.shown(ids.BATCH, batch.id),
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": file_id(batch.input_file_id),
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": file_id(batch.output_file_id),
        "error_file_id": file_id(batch.error_file_id),
        "created_at": seconds(batch.created_at),
        **{f"{name}_at": seconds(getattr(batch, f"{name}_at")) for name in _MOMENTS},
        "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata,
    }


async def _create(exchange: Exchange, archive: Archive, caller: Caller) -> None:
    wanted = decode(_decoder, await exchange.json_body(BODY_BYTES))
    if wanted.endpoint not in services.ENDPOINTS:
        message = f"'endpoint' must be one of {', '.join(services.ENDPOINTS)}."
        raise invalid(Reason.INVALID_VALUE, message, "endpoint")
    if wanted.metadata is not None and len(wanted.metadata) > MAX_PAIRS:
        raise invalid(Reason.INVALID_VALUE, f"'metadata' may have at most {MAX_PAIRS} pairs.", "metadata")
    if any("\0" in text for pair in (wanted.metadata or {}).items() for text in pair):
        raise invalid(Reason.INVALID_VALUE, "'metadata' must not hold a NUL character.", "metadata")
    file_id = ids.parse(ids.FILE, wanted.input_file_id)
    lifetime = wanted.output_expires_after
    create = partial(
        services.create_batch,
        owner=owner_of(caller),
        endpoint=wanted.endpoint,
        input_file_id=file_id or UUID(int=0),
        completion_window=wanted.completion_window,
        output_lifetime_s=FILE_LIFETIME_S if lifetime is None else lifetime.seconds,
        metadata=wanted.metadata,
        most_open=archive.open_batches,
        form_id=None if exchange.operation_id is None else UUID(exchange.operation_id),
    )
    try:
        batch = await archive.ask(create, may_repeat=exchange.operation_id is not None)
    except SentBefore as sent:
        batch = sent.made
    except NoSuchObject as error:
        refusal = not_found(Reason.FILE_NOT_FOUND, "file", wanted.input_file_id, "input_file_id")
        raise InvalidRequest(refusal) from error
    except TooManyOpenBatches as error:
        message = f"At most {archive.open_batches} batches of a tenant may be open; wait until one has ended."
        raise invalid(Reason.OPEN_BATCHES, message) from error
    with suppress(OperationalError):  # no thread is free; beat asks again
        await archive.threads.run(partial(wishes.ask_for, wishes.VALIDATE, batch.id))
    await exchange.answer(200, encode(shown(batch)))


async def _list(exchange: Exchange, archive: Archive, caller: Caller) -> None:
    query = exchange.query("after", "limit")
    look = partial(
        selectors.batches, UUID(caller.tenant_id), limit=limit_of(query, MAX_PAGE), after=after_of(query, ids.BATCH)
    )
    await exchange.answer(200, listed(await archive.ask(look), shown))


async def _show(exchange: Exchange, archive: Archive, caller: Caller, name: str) -> None:
    batch_id = ids.parse(ids.BATCH, name)
    found = None
    if batch_id is not None:
        found = await archive.ask(partial(selectors.batch, UUID(caller.tenant_id), batch_id))
    if found is None:
        raise InvalidRequest(not_found(Reason.BATCH_NOT_FOUND, "batch", name))
    await exchange.answer(200, encode(shown(found)))


async def _cancel(exchange: Exchange, archive: Archive, caller: Caller, name: str) -> None:
    batch_id = ids.parse(ids.BATCH, name)
    try:
        if batch_id is None:
            raise NoSuchObject
        batch = await archive.ask(partial(services.cancel_batch, owner=owner_of(caller), batch_id=batch_id))
    except NoSuchObject as error:
        raise InvalidRequest(not_found(Reason.BATCH_NOT_FOUND, "batch", name)) from error
    except WrongState as error:
        raise InvalidRequest(Refusal(reason=Reason.WRONG_STATE, message=str(error))) from error
    await exchange.answer(200, encode(shown(batch)))


_create_route = route("POST", "/v1/batches", _create)
ROUTES = (
    replace(_create_route, handler=idempotency.once(_create_route.handler)),
    route("GET", "/v1/batches", _list, reads_query=True),
    route("GET", "/v1/batches/*", _show),
    route("POST", "/v1/batches/*/cancel", _cancel),
)
