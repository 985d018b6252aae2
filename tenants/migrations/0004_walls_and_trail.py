"""Members stand behind the wall, tenants write what is theirs, and triggers keep the audit trail."""

from django.db import migrations

from tenants.audit import watch
from tenants.isolation import protect

# TG_ARGV: id column, tenant column ('' where no one tenant is meant). Digests stay out; a key that was merely used is
# no change. It runs as the owner, whom forced row security lets insert here and do nothing else.
_TRIGGER = """
CREATE FUNCTION tenants_audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS $$
DECLARE
    hidden text[] := ARRAY['secret_sha256', 'previous_sha256', 'token_sha256', 'last_used_at'];
    old_row jsonb := CASE WHEN TG_OP = 'INSERT' THEN NULL ELSE to_jsonb(OLD) - hidden END;
    new_row jsonb := CASE WHEN TG_OP = 'DELETE' THEN NULL ELSE to_jsonb(NEW) - hidden END;
    whole jsonb := coalesce(new_row, old_row);
    old_part jsonb := old_row;
    new_part jsonb := new_row;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        SELECT coalesce(jsonb_object_agg(key, value), '{}') INTO old_part
            FROM jsonb_each(old_row) WHERE value IS DISTINCT FROM new_row -> key;
        SELECT coalesce(jsonb_object_agg(key, value), '{}') INTO new_part
            FROM jsonb_each(new_row) WHERE value IS DISTINCT FROM old_row -> key;
        IF old_part = new_part THEN
            RETURN NULL;
        END IF;
    END IF;
    INSERT INTO tenants_auditevent
        (at, tenant_id, object_type, object_id, action, before, after, actor, reason, request_id)
    VALUES (
        clock_timestamp(),
        CASE WHEN TG_ARGV[1] = '' THEN NULL ELSE (whole ->> TG_ARGV[1])::uuid END,
        split_part(TG_TABLE_NAME, '_', 2),
        whole ->> TG_ARGV[0],
        lower(TG_OP),
        old_part,
        new_part,
        coalesce(nullif(current_setting('app.actor', true), ''), 'sql:' || session_user),
        coalesce(current_setting('app.reason', true), ''),
        left(coalesce(current_setting('app.request', true), ''), 64)
    );
    RETURN NULL;
END $$
"""


def _may_write(table, grants):
    return migrations.RunSQL(f"GRANT {grants} ON {table} TO app_rw", f"REVOKE {grants} ON {table} FROM app_rw")


class Migration(migrations.Migration):
    dependencies = [("tenants", "0003_accounts")]

    operations = [
        migrations.RunSQL(_TRIGGER, "DROP FUNCTION tenants_audit"),
        protect("tenants_membership", writes="INSERT, UPDATE (role), DELETE"),
        protect("tenants_invitation", writes="INSERT, UPDATE (ended_at)"),
        protect("tenants_auditevent"),
        migrations.RunSQL(
            [
                "CREATE POLICY by_trigger ON tenants_auditevent FOR INSERT TO app_owner WITH CHECK (true)",
                "REVOKE INSERT, UPDATE, DELETE ON tenants_auditevent FROM app_ops",
            ],
            [
                "GRANT INSERT, UPDATE, DELETE ON tenants_auditevent TO app_ops",
                "DROP POLICY by_trigger ON tenants_auditevent",
            ],
        ),
        _may_write("tenants_project", "INSERT, UPDATE (name, default_class)"),
        _may_write(
            "tenants_apikey",
            "INSERT, UPDATE (revoked_at, revoked_by, secret_sha256, last4, previous_sha256, previous_last4,"
            " previous_until, rotated_at)",
        ),
        watch("tenants_tenant", tenant_column="id"),
        watch("tenants_project"),
        watch("tenants_apikey"),
        watch("tenants_membership"),
        watch("tenants_invitation"),
        watch("tenants_quotapolicy"),
        watch("tenants_priorityclass", id_column="label", tenant_column=None),
        watch("tenants_policyversion", id_column="version", tenant_column=None),
    ]
