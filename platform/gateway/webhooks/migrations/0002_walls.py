"""Row-level security, deliveries that cannot point across tenants, and the trail of endpoints."""

from django.db import migrations

from tenants.audit import watch
from tenants.isolation import protect


class Migration(migrations.Migration):
    dependencies = [("webhooks", "0001_initial"), ("tenants", "0004_walls_and_trail")]

    operations = [
        migrations.RunSQL(
            "ALTER TABLE webhooks_delivery ADD CONSTRAINT webhooks_delivery_endpoint_id_of_its_tenant"
            " FOREIGN KEY (tenant_id, endpoint_id) REFERENCES webhooks_endpoint (tenant_id, id)"
            " ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED",
            "ALTER TABLE webhooks_delivery DROP CONSTRAINT webhooks_delivery_endpoint_id_of_its_tenant",
        ),
        protect("webhooks_endpoint", writes="INSERT, UPDATE (is_active, secret_number, previous_until), DELETE"),
        protect("webhooks_delivery", writes="UPDATE (state, num_attempts, next_at), DELETE"),
        watch("webhooks_endpoint"),
    ]
