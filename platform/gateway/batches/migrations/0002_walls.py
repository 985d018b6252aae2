"""Row-level security, keys that cannot point across tenants, and the little that app_rw may write."""

from django.db import migrations

from tenants.isolation import protect


def _same_tenant(table, column, target):
    name = f"{table}_{column}_of_its_tenant"
    return migrations.RunSQL(
        f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY (tenant_id, {column})"
        f" REFERENCES {target} (tenant_id, id) DEFERRABLE INITIALLY DEFERRED",
        f"ALTER TABLE {table} DROP CONSTRAINT {name}",
    )


class Migration(migrations.Migration):
    dependencies = [("batches", "0001_initial"), ("tenants", "0002_walls_and_classes")]

    operations = [
        _same_tenant("batches_storedfile", "project_id", "tenants_project"),
        _same_tenant("batches_batch", "project_id", "tenants_project"),
        _same_tenant("batches_line", "batch_id", "batches_batch"),
        protect("batches_storedfile"),
        protect("batches_batch"),
        protect("batches_line"),
        migrations.RunSQL(
            [
                "GRANT INSERT ON batches_storedfile, batches_batch TO app_rw",
                "GRANT UPDATE (deleted_at) ON batches_storedfile TO app_rw",
                "GRANT UPDATE (status, cancelling_at) ON batches_batch TO app_rw",
            ],
            [
                "REVOKE UPDATE (status, cancelling_at) ON batches_batch FROM app_rw",
                "REVOKE UPDATE (deleted_at) ON batches_storedfile FROM app_rw",
                "REVOKE INSERT ON batches_storedfile, batches_batch FROM app_rw",
            ],
        ),
    ]
