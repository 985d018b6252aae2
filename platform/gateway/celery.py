"""The Celery application: short, idempotent tasks behind the scenes, never on the way of a token."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")

app = Celery("rubato")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
