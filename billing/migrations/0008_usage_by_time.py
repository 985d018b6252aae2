import django.contrib.postgres.indexes
from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0007_requested_class'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='usagerequest',
            index=django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=['reserved_at'], name='usage_by_time'),
        ),
    ]
