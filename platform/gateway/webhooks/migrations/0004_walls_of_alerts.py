"""Row-level security for lines and alerts, and the trail of lines."""

from django.db import migrations

from tenants.audit import watch
from tenants.isolation import protect


class Migration(migrations.Migration):
    dependencies = [("webhooks", "0003_alerts"), ("tenants", "0007_drafts")]

    operations = [
        protect("webhooks_threshold", writes="INSERT, DELETE"),
        protect("webhooks_alert"),
        watch("webhooks_threshold"),
    ]
