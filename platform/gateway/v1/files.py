"""/v1/files: upload to disk as it arrives, list, show, download, delete.

Knows the OpenAI file shape; refuses to know what is in a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote
from uuid import UUID

from django.utils import timezone

from gateway.auth import Caller
from gateway.batches import ids, selectors, services
from gateway.batches.archive import Archive
from gateway.batches.models import StoredFile
from gateway.batches.services import FILE_LIFETIME_S, NewFile, NoSuchObject, TenantStorageFull
from gateway.batches.storage import ContentLost, Draft, StorageFull
from gateway.errors import InvalidRequest, Reason, invalid
from gateway.v1.archive import after_of, encode, limit_of, listed, not_found, owner_of, route
from gateway.v1.archive import seconds as seconds_of
from gateway.v1.http import Exchange
from gateway.v1.multipart import MAX_NAME, Form

Result = TypeVar("Result")

MAX_PAGE = 10_000
WRITE_BYTES = 1_048_576  # gathered before a thread writes them
READ_BYTES = 262_144
FORM_BYTES = 65_536  # what a form may have besides its file
UPLOAD_S = 3_600.0  # for a whole file to arrive
LIFETIMES_S = (3_600, 2_592_000)


def shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": ids.shown(ids.FILE, file.id),
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": seconds_of(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": seconds_of(file.expires_at),
    }


async def _create(exchange: Exchange, archive: Archive, caller: Caller) -> None:
    form = Form(exchange.header(b"content-type"))
    with archive.upload(caller.tenant_id), _storage_errors(), archive.storage.draft() as draft:
        await _to_its_end(asyncio.to_thread(draft.write, b""))  # a full disk is told before the body is read
        await _receive(exchange, archive, form, draft)
        lifetime_s = _lifetime_s(form)
        _check(form, draft)
        row = await _to_its_end(_kept(archive, caller, form, draft, lifetime_s))
    await exchange.answer(200, encode(shown(row)))


async def _receive(exchange: Exchange, archive: Archive, form: Form, draft: Draft) -> None:
    """The body, from the socket to the disk. Raises InvalidRequest, StorageFull."""
    limit_bytes = archive.file_limit_bytes
    too_large = invalid(Reason.BODY_TOO_LARGE, f"A file may have at most {limit_bytes} bytes.", "file")
    gathered = bytearray()
    try:
        async with aclosing(exchange.body_parts(limit_bytes + FORM_BYTES, UPLOAD_S)) as parts:
            async for part in parts:
                gathered += form.feed(part)
                if draft.num_bytes + len(gathered) > limit_bytes:
                    raise too_large
                if len(gathered) >= WRITE_BYTES:
                    await _to_its_end(asyncio.to_thread(draft.write, bytes(gathered)))
                    gathered.clear()
    except InvalidRequest as error:
        raise too_large if error.refusal.reason is Reason.BODY_TOO_LARGE else error from error
    form.close()
    await _to_its_end(asyncio.to_thread(draft.write, bytes(gathered)))


async def _to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What has begun on the disk, or has content there, ends before whoever is cancelled meanwhile goes on."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _check(form: Form, draft: Draft) -> None:
    unknown = sorted(set(form.fields) - {"purpose", "expires_after[anchor]", "expires_after[seconds]"})
    if unknown:
        raise invalid(Reason.UNKNOWN_PARAMETER, f"Unknown parameter: {unknown[0][:80]!r}.", unknown[0][:80])
    if "purpose" not in form.fields:
        raise invalid(Reason.MISSING_PARAMETER, "Missing required parameter: 'purpose'.", "purpose")
    if form.fields["purpose"] != "batch":
        raise invalid(Reason.INVALID_VALUE, "'purpose' must be 'batch': nothing else reads files here.", "purpose")
    if form.filename is None:
        raise invalid(Reason.MISSING_PARAMETER, "Missing required parameter: 'file'.", "file")
    if not draft.num_bytes:
        raise invalid(Reason.INVALID_VALUE, "The file is empty.", "file")


def _lifetime_s(form: Form) -> int:
    anchor, text = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return FILE_LIFETIME_S
    if anchor != "created_at":
        raise invalid(Reason.INVALID_VALUE, "'expires_after[anchor]' must be 'created_at'.", "expires_after[anchor]")
    least, most = LIFETIMES_S
    if text is None or not (text.isascii() and text.isdigit()) or not least <= int(text[:12]) <= most:
        message = f"'expires_after[seconds]' must be a whole number from {least} to {most}."
        raise invalid(Reason.INVALID_VALUE, message, "expires_after[seconds]")
    return int(text)


async def _kept(archive: Archive, caller: Caller, form: Form, draft: Draft, lifetime_s: int) -> StoredFile:
    """The content for good, and then its row. Whatever else fails, content without a row is swept later."""
    file = NewFile(
        storage_name=await asyncio.to_thread(draft.keep),
        filename=plain_name(form.filename or ""),
        num_bytes=draft.num_bytes,
        purpose="batch",
        lifetime_s=lifetime_s,
    )
    try:
        keep = partial(services.keep_file, owner=owner_of(caller), file=file, limit_bytes=archive.tenant_limit_bytes)
        return await archive.ask(keep, may_repeat=False)
    except TenantStorageFull as error:
        await asyncio.to_thread(archive.storage.remove, file.storage_name)
        message = f"All files together may have {archive.tenant_limit_bytes} bytes; delete some first."
        raise invalid(Reason.STORAGE_QUOTA, message, "file") from error


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except StorageFull as error:
        raise invalid(Reason.STORAGE_FULL, "There is no room for this file now; nothing of it was kept.") from error


def plain_name(name: str) -> str:
    """A file name without folders and control characters."""
    last = PurePosixPath(name.replace("\\", "/")).name
    return "".join(character for character in last if character.isprintable())[:MAX_NAME] or "upload"


async def _list(exchange: Exchange, archive: Archive, caller: Caller) -> None:
    query = exchange.query("after", "limit", "order", "purpose")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(Reason.INVALID_VALUE, "'order' must be 'asc' or 'desc'.", "order")
    look = partial(
        selectors.files,
        UUID(caller.tenant_id),
        timezone.now(),
        limit=limit_of(query, MAX_PAGE),
        after=after_of(query, ids.FILE),
        newest_first=order == "desc",
        purpose=query.get("purpose"),
    )
    await exchange.answer(200, listed(await archive.ask(look), shown))


async def _show(exchange: Exchange, archive: Archive, caller: Caller, name: str) -> None:
    await exchange.answer(200, encode(shown(await _found(archive, caller, name))))


async def _delete(exchange: Exchange, archive: Archive, caller: Caller, name: str) -> None:
    file_id = ids.parse(ids.FILE, name)
    try:
        if file_id is None:
            raise NoSuchObject
        await archive.ask(partial(services.delete_file, owner=owner_of(caller), file_id=file_id))
    except NoSuchObject as error:
        raise InvalidRequest(not_found(Reason.FILE_NOT_FOUND, "file", name)) from error
    await exchange.answer(200, encode({"id": name, "object": "file", "deleted": True}))


async def _content(exchange: Exchange, archive: Archive, caller: Caller, name: str) -> None:
    row = await _found(archive, caller, name)
    try:
        content = await asyncio.to_thread(archive.storage.open, row.storage_name)
    except ContentLost as error:
        raise InvalidRequest(not_found(Reason.FILE_NOT_FOUND, "file", name)) from error
    with content:
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(row.num_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(row.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        await exchange.start(200, headers)
        async for piece in _pieces(content):
            await exchange.write(piece)
        await exchange.end()


async def _pieces(content: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(content.read, READ_BYTES):
        yield piece


async def _found(archive: Archive, caller: Caller, name: str) -> StoredFile:
    """Raises InvalidRequest."""
    file_id = ids.parse(ids.FILE, name)
    found = None
    if file_id is not None:
        found = await archive.ask(partial(selectors.file, UUID(caller.tenant_id), file_id, timezone.now()))
    if found is None:
        raise InvalidRequest(not_found(Reason.FILE_NOT_FOUND, "file", name))
    return found


ROUTES = (
    route("POST", "/v1/files", _create),
    route("GET", "/v1/files", _list, reads_query=True),
    route("GET", "/v1/files/*", _show),
    route("DELETE", "/v1/files/*", _delete),
    route("GET", "/v1/files/*/content", _content),
)
