"""The ledger and the prices are inserted only; every tenant table stands behind row-level security."""

from django.db import migrations

from tenants.isolation import protect

_INSERTED_ONLY = ["billing_ledgerentry", "billing_priceversion", "billing_price"]


def _insert_only(table):
    return migrations.RunSQL(
        [
            f"CREATE TRIGGER insert_only BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION billing_refuse_change()",
            f"REVOKE UPDATE, DELETE ON {table} FROM app_ops",
        ],
        [f"GRANT UPDATE, DELETE ON {table} TO app_ops", f"DROP TRIGGER insert_only ON {table}"],
    )


class Migration(migrations.Migration):
    dependencies = [("billing", "0001_initial"), ("tenants", "0002_walls_and_classes")]

    operations = [
        migrations.RunSQL(
            "CREATE FUNCTION billing_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE EXCEPTION 'rows of % are inserted only; write an adjustment', TG_TABLE_NAME; END $$",
            "DROP FUNCTION billing_refuse_change()",
        ),
        *[_insert_only(table) for table in _INSERTED_ONLY],
        migrations.RunSQL(
            "REVOKE DELETE ON billing_usagerequest, billing_ledgeralert FROM app_ops",
            "GRANT DELETE ON billing_usagerequest, billing_ledgeralert TO app_ops",
        ),
        protect("billing_usagerequest"),
        protect("billing_ledgerentry"),
        protect("billing_rollup"),
        migrations.RunSQL(
            "GRANT SELECT ON billing_price, billing_priceversion TO app_rw",
            "REVOKE SELECT ON billing_price, billing_priceversion FROM app_rw",
        ),
    ]
