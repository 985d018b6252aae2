"""Row-level security; a tenant's own role puts its responses there and throws them away, and changes none."""

from django.db import migrations

from tenants.isolation import protect


class Migration(migrations.Migration):
    dependencies = [("stored", "0001_initial"), ("tenants", "0002_walls_and_classes")]

    operations = [protect("stored_storedresponse", writes="INSERT, DELETE")]
