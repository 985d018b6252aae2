"""Price lists are on the audit trail."""

from django.db import migrations

from tenants.audit import watch


class Migration(migrations.Migration):
    dependencies = [("billing", "0004_statements_and_keys"), ("tenants", "0004_walls_and_trail")]

    operations = [
        watch("billing_priceversion", id_column="version", tenant_column=None),
        watch("billing_price", tenant_column=None),
    ]
