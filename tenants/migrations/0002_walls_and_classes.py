"""Row-level security on every tenant table, keys that cannot point across tenants, and the three classes."""

from django.db import migrations

from tenants.isolation import protect

_SAME_FOR_ALL = {
    "cap_slots_percent": 100,
    "fairness_gap_ms": 1_000,
    "quantum_steps": 16,
    "step_cap_percent": 30,
    "token_budget_max": 2_048,
    "chunk_max": 1_024,
    "chunk_min": 64,
    "bypass_limit": 8,
    "max_preemptions": 4,
    "governor_on_percent": 5,
    "governor_off_percent": 2,
}
_CLASSES = {
    "interactive": {
        "ttft_target_ms": 300,
        "tbt_target_ms": 50,
        "max_queue_wait_ms": 10_000,
        "floor_percent": 0,
        "cap_memory_percent": 100,
        "patience_steps": 2,
    },
    "default": {
        "ttft_target_ms": 2_000,
        "tbt_target_ms": 200,
        "max_queue_wait_ms": 60_000,
        "floor_percent": 20,
        "cap_memory_percent": 94,
        "patience_ms": 1_000,
    },
    "batch": {"floor_percent": 5, "cap_memory_percent": 94},
}


def make_classes(apps, schema_editor):
    rows = apps.get_model("tenants", "PriorityClass").objects.using(schema_editor.connection.alias)
    for label, own in _CLASSES.items():
        rows.create(label=label, **_SAME_FOR_ALL, **own)


class Migration(migrations.Migration):
    dependencies = [("tenants", "0001_initial")]

    operations = [
        migrations.RunPython(make_classes, migrations.RunPython.noop),
        migrations.RunSQL(
            "ALTER TABLE tenants_apikey ADD CONSTRAINT apikey_project_of_its_tenant FOREIGN KEY (tenant_id, project_id)"
            " REFERENCES tenants_project (tenant_id, id) DEFERRABLE INITIALLY DEFERRED",
            "ALTER TABLE tenants_apikey DROP CONSTRAINT apikey_project_of_its_tenant",
        ),
        migrations.RunSQL(
            "REVOKE UPDATE, DELETE ON tenants_policyversion FROM app_ops",
            "GRANT UPDATE, DELETE ON tenants_policyversion TO app_ops",
        ),
        protect("tenants_tenant", tenant_column="id"),
        protect("tenants_project"),
        protect("tenants_apikey"),
        protect("tenants_quotapolicy"),
    ]
