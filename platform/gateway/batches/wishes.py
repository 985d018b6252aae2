"""Asking Celery for something, by name. A wish may be lost: beat asks again for whatever is not done."""

from __future__ import annotations

import logging
from uuid import UUID

from celery.exceptions import OperationalError as BrokerDown

from gateway.celery import app

# At once or not at all: the connection's own patience is for workers, and a client waits for its answer meanwhile.
_AT_ONCE = {"max_retries": 0, "interval_start": 0, "socket_connect_timeout": 1, "socket_timeout": 1}
log = logging.getLogger(__name__)
VALIDATE = "gateway.batches.tasks.validate_batch"
FINALISE = "gateway.batches.tasks.finalise_batch"


def ask_for(task_name: str, batch_id: UUID) -> None:
    """Blocks until the broker has taken it, a second or two at most."""
    options = {**app.conf.broker_transport_options, **_AT_ONCE}
    try:
        with app.connection_for_write(transport_options=options) as connection:
            app.send_task(task_name, [str(batch_id)], retry=False, connection=connection)
    except BrokerDown as error:
        log.warning("%s of batch %s waits for beat: %s", task_name, batch_id, error)
