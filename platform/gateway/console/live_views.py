"""The operator's board as a page, and the two things it can ask of a worker. The numbers come over the socket."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from asgiref.sync import sync_to_async
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.views.decorators import staff_member_required
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.contenttypes.models import ContentType
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from gateway.console import board_csv
from gateway.console.consumers import LiveConsumer
from gateway.console.switchboard import switchboard
from gateway.loads import loads
from scheduler_engine.policy import PriorityClass
from tenants.models import Tenant
from tenants.operators import MAY_EDIT_POLICY
from wire.bus import BusError
from wire.messages import Explained, LoadSnapshot

log = logging.getLogger(__name__)

MOST_NAMES = 1_000


@require_safe
@staff_member_required
@never_cache
def live(request: HttpRequest) -> HttpResponse:
    context = {
        "classes": [each.label for each in PriorityClass],
        "tenants": _names(),
        "tables": list(board_csv.TABLES),
        "may_drain": request.user.has_perm(MAY_EDIT_POLICY),
    }
    return render(request, "operator/live.html", context)


@require_safe
@staff_member_required
@never_cache
async def as_csv(request: HttpRequest, table: str) -> HttpResponse:
    """One of the board's tables as it is now, of every worker that was heard in the last two minutes."""
    if table not in board_csv.TABLES:
        raise Http404("There is no such table.")
    _, frame = await LiveConsumer.feed.frame_after(0)
    text = board_csv.text(orjson.loads(frame), table, await sync_to_async(_names)())
    name = f"board-{table}-{timezone.now():%Y%m%dT%H%M%SZ}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(text, content_type="text/csv; charset=utf-8", headers=headers)


def _names() -> dict[str, str]:
    found = Tenant.objects.order_by("-created_at").values_list("id", "name")[:MOST_NAMES]
    return {str(tenant_id): name for tenant_id, name in found}


@require_safe
@staff_member_required
@never_cache
async def explain(request: HttpRequest) -> HttpResponse:
    """Where the time of a request goes, asked of its worker. 404 where nobody remembers it, 503 without an answer."""
    response_id = request.GET.get("response", "")
    try:
        worker = await _worker(request.GET.get("worker", ""))
        answer = await switchboard.explain(worker.worker_id, response_id) if worker else None
    except BusError as error:
        return JsonResponse({"error": f"The worker cannot be asked: {error}."}, status=503)
    if worker is None:
        return JsonResponse({"error": "This worker has gone."}, status=404)
    if answer is None:
        return JsonResponse({"error": "The worker did not answer within three seconds."}, status=503)
    if not answer.is_known:
        return JsonResponse({"error": "The worker does not remember this request any more."}, status=404)
    return JsonResponse(_plain(answer))


def _plain(answer: Explained) -> dict[str, Any]:
    return {
        "response": answer.response_id,
        "sentence": answer.sentence,
        "outcome": answer.outcome,
        "total_us": answer.total_us,
        "queue_us": answer.queue_us,
        "paused_us": answer.paused_us,
        "ttft_us": answer.ttft_us,
        "waits": answer.waits,
        "timeline": answer.timeline,
        "is_whole": answer.is_whole,
    }


@require_POST
@staff_member_required
async def drain(request: HttpRequest) -> HttpResponse:
    """Tell a worker to finish what it has and end. On record with its actor before it is said."""
    user = await request.auser()
    if isinstance(user, AnonymousUser) or not await user.ahas_perm(MAY_EDIT_POLICY):
        return HttpResponse("You may look at workers, not drain them.", status=403, content_type="text/plain")
    try:
        worker = await _worker(request.POST.get("worker", ""))
        if worker is None or str(worker.epoch) != request.POST.get("epoch"):
            await _say(request, messages.ERROR, "This worker has gone, or has begun anew; nobody was drained.")
        else:
            await _on_record(user, worker)
            await switchboard.drain(worker.worker_id, worker.epoch, user.get_username())
            await _say(request, messages.SUCCESS, f"{worker.worker_id} was told to drain.")
    except BusError as error:
        await _say(request, messages.ERROR, f"The worker could not be told: {error}.")
    return redirect("live")


async def _worker(worker_id: str) -> LoadSnapshot | None:
    return next((load for load in await loads() if load.worker_id == worker_id), None)


async def _on_record(user: User, worker: LoadSnapshot) -> None:
    log.info("worker %s, epoch %s: drained by %s", worker.worker_id, worker.epoch, user.get_username())
    kind, _ = await ContentType.objects.aget_or_create(app_label="gateway", model="worker")  # no table: the log's word
    await LogEntry.objects.acreate(
        user_id=user.pk,
        content_type=kind,
        object_id=worker.worker_id,
        object_repr=f"worker {worker.worker_id}: drained",
        action_flag=CHANGE,
        change_message=f"Drained, epoch {worker.epoch}.",
    )


async def _say(request: HttpRequest, level: int, text: str) -> None:
    await sync_to_async(messages.add_message)(request, level, text)
