"""Batches of a tenant: a file handed in, how far each is, what came of it. The services are those of /v1.

Knows forms and rows; refuses to know how lines are checked (Celery) and driven (``run_batches``).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from gateway.batches import ids, selectors, services, wishes
from gateway.batches.models import Batch
from gateway.batches.services import (
    ENDPOINTS,
    FILE_LIFETIME_S,
    NewFile,
    Owner,
    SentBefore,
    TenantStorageFull,
    WrongState,
)
from gateway.batches.storage import ContentLost, Storage, StorageFull
from gateway.batches.validation import MAX_ERRORS
from gateway.console.pages.membership import Member, page
from gateway.downloads import Pieces
from gateway.v1.files import plain_name
from tenants.checks import SENT_BEFORE
from tenants.forms import Once
from tenants.isolation import ALIAS
from tenants.models import ApiKey
from tenants.roles import Capability
from tenants.selectors import open_keys

SHOWN = 25
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


@dataclass(frozen=True, slots=True)
class Row:
    """A batch as the pages show it. ``files`` are those that can still be had."""

    batch: Batch
    filename: str
    files: list[tuple[str, uuid.UUID, int]]

    @property
    def shown_id(self) -> str:
        return ids.shown(ids.BATCH, self.batch.id)

    @property
    def num_done(self) -> int:
        return self.batch.num_completed + self.batch.num_failed

    @property
    def is_unfinished(self) -> bool:
        return self.batch.status in UNFINISHED

    @property
    def num_errors(self) -> str:
        """A check ends at so many: what is behind them was not looked at."""
        found = len(self.batch.errors)
        return f"the first {found} errors" if self.is_check_cut_short else f"{found} error{'s' * (found != 1)}"

    @property
    def is_check_cut_short(self) -> bool:
        return len(self.batch.errors) >= MAX_ERRORS

    @property
    def may_be_cancelled(self) -> bool:
        return self.batch.status in ("validating", "in_progress")


class ByName(forms.ModelChoiceField):  # type: ignore[type-arg]
    """A choice of keys, by what they are called."""

    def label_from_instance(self, obj: Any) -> str:
        return f"{obj.name} …{obj.last4}, {obj.project.name}"


class NewBatch(Once):
    file = forms.FileField(label="input file", help_text="JSON lines, as for /v1/batches: choose it, or drop it here")
    endpoint = forms.ChoiceField(choices=[(one, one) for one in ENDPOINTS])
    key = ByName(
        ApiKey.objects.none(),
        empty_label=None,
        label="in the name of",
        help_text="its lines are counted on this key, and stop when it is revoked",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        key = self.fields["key"]
        assert isinstance(key, forms.ModelChoiceField)
        key.queryset = open_keys().select_related("project")

    def clean_file(self) -> UploadedFile[Any]:
        given: UploadedFile[Any] = self.cleaned_data["file"]
        if (given.size or 0) > settings.RUBATO_FILE_LIMIT_BYTES:
            raise ValidationError(f"A file may have at most {settings.RUBATO_FILE_LIMIT_BYTES} bytes.")
        return given


@page(Capability.USE_PLAYGROUND)
def batches(request: HttpRequest, me: Member) -> HttpResponse:
    """The list, newest first, and the form; with HX-Request the list alone, for as long as one is unfinished."""
    form = NewBatch(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid():
        try:
            made = _make(me, form)
        except SentBefore as refusal:
            messages.info(request, SENT_BEFORE)
            made = refusal.made
        if made is not None:
            return redirect("console-batch", slug=me.tenant.slug, batch_id=made.id)
    after = request.GET.get("after")
    found = selectors.newest_batches(limit=SHOWN, after=ids.parse(ids.BATCH, after) if after else None)
    rows = _rows(found.rows)
    context = {
        "me": me,
        "rows": rows,
        "older": rows[-1].shown_id if found.has_more else None,
        "is_unfinished": any(row.is_unfinished for row in rows),
        "form": form,
    }
    return render(request, f"console/batches{_fragment(request)}.html", context)


@require_safe
@page(Capability.USE_PLAYGROUND)
def batch(request: HttpRequest, me: Member, batch_id: uuid.UUID) -> HttpResponse:
    """One of them, its errors by line, its files."""
    context = {"me": me, "row": _rows([_batch(batch_id)])[0]}
    return render(request, f"console/batch{_fragment(request)}.html", context)


@require_POST
@page(Capability.USE_PLAYGROUND)
def cancel(request: HttpRequest, me: Member, batch_id: uuid.UUID) -> HttpResponse:
    """What has finished stays."""
    found = _batch(batch_id)
    owner = Owner(
        tenant_id=me.tenant.id,
        project_id=found.project_id,
        key_id=found.key_id,
        key_public_id=found.key_public_id,
    )
    try:
        services.cancel_batch(owner=owner, batch_id=batch_id)
    except WrongState as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, "It is being cancelled: lines that have ended stay, and are charged.")
    return redirect("console-batch", slug=me.tenant.slug, batch_id=batch_id)


@require_safe
@page(Capability.USE_PLAYGROUND)
def file(request: HttpRequest, me: Member, file_id: uuid.UUID) -> StreamingHttpResponse:
    """The content, piece by piece."""
    row = selectors.file(me.tenant.id, file_id, timezone.now())
    if row is None:
        raise Http404("There is no such file.")
    try:
        content = _storage().open(row.storage_name)
    except ContentLost as error:
        raise Http404("There is no such file.") from error
    headers = {
        "Content-Length": str(row.num_bytes),
        "Content-Encoding": "identity",  # else it would be packed on its way, and its length not told
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(row.filename, safe='')}",
    }
    return StreamingHttpResponse(Pieces(content), content_type="application/octet-stream", headers=headers)


def _make(me: Member, form: NewBatch) -> Batch | None:
    """None where there was no room: the form says so. Raises SentBefore, with nothing kept."""
    key, given = form.cleaned_data["key"], form.cleaned_data["file"]
    owner = Owner(tenant_id=me.tenant.id, project_id=key.project_id, key_id=key.id, key_public_id=key.public_id)
    storage, limit_bytes = _storage(), settings.RUBATO_TENANT_FILES_BYTES
    try:
        with storage.draft() as draft:
            for piece in given.chunks():
                draft.write(piece)
            content = NewFile(
                storage_name=draft.keep(),
                filename=plain_name(given.name or ""),
                num_bytes=draft.num_bytes,
                purpose="batch",
                lifetime_s=FILE_LIFETIME_S,
            )
    except StorageFull:
        form.add_error("file", "There is no room for this file now; nothing of it was kept.")
        return None
    try:
        with transaction.atomic(using=ALIAS):
            kept = services.keep_file(owner=owner, file=content, limit_bytes=limit_bytes)
            made = services.create_batch(
                owner=owner,
                endpoint=form.cleaned_data["endpoint"],
                input_file_id=kept.id,
                completion_window="24h",
                form_id=form.cleaned_data["made_id"],
            )
    except SentBefore:
        storage.remove(content.storage_name)
        raise
    except TenantStorageFull:
        storage.remove(content.storage_name)
        form.add_error("file", f"All files together may have {limit_bytes} bytes; delete some first.")
        return None
    transaction.on_commit(partial(wishes.ask_for, wishes.VALIDATE, made.id), using=ALIAS)
    return made


def _batch(batch_id: uuid.UUID) -> Batch:
    """Of the tenant in force."""
    found = Batch.objects.using(ALIAS).filter(id=batch_id).first()
    if found is None:
        raise Http404("There is no such batch.")
    return found


def _rows(found: Any) -> list[Row]:
    """With their files in one query."""
    wanted = {name for one in found for name in (one.input_file_id, one.output_file_id, one.error_file_id)} - {None}
    live = {row.id: row for row in selectors.live_files(timezone.now()).filter(id__in=wanted)}
    rows = []
    for one in found:
        kinds = (("input", one.input_file_id), ("output", one.output_file_id), ("errors", one.error_file_id))
        files = [(kind, name, live[name].num_bytes) for kind, name in kinds if name in live]
        title = live[one.input_file_id].filename if one.input_file_id in live else "a file that is gone"
        rows.append(Row(one, title, files))
    return rows


def _fragment(request: HttpRequest) -> str:
    """What asks again is a GET; the form, which htmx sends too, takes its own part of the whole page."""
    return "_list" if request.method == "GET" and "HX-Request" in request.headers else ""


def _storage() -> Storage:
    return Storage(Path(settings.RUBATO_FILES_DIR))
