"""Asking Celery for something, by name. A wish may be lost: beat asks again for whatever is not done."""

from __future__ import annotations

import logging
from uuid import UUID

from celery.exceptions import OperationalError as BrokerDown

from gateway.celery import app

log = logging.getLogger(__name__)
VALIDATE = "gateway.batches.tasks.validate_batch"
FINALISE = "gateway.batches.tasks.finalise_batch"


def ask_for(task_name: str, batch_id: UUID) -> None:
    """Blocks until the broker has taken it, or has not answered."""
    try:
        app.send_task(task_name, [str(batch_id)], retry=False)
    except BrokerDown as error:
        log.warning("%s of batch %s waits for beat: %s", task_name, batch_id, error)
