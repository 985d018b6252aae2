import django.contrib.postgres.indexes
from django.db import migrations


class Migration(migrations.Migration):
    """Sets the index's option where it stands: to make it anew would hold up writers of a large ledger."""

    dependencies = [
        ('billing', '0009_bounded_amounts'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    'ALTER INDEX ledger_by_time SET (autosummarize = on)',
                    'ALTER INDEX ledger_by_time RESET (autosummarize)',
                ),
            ],
            state_operations=[
                migrations.RemoveIndex('ledgerentry', 'ledger_by_time'),
                migrations.AddIndex(
                    'ledgerentry',
                    django.contrib.postgres.indexes.BrinIndex(
                        autosummarize=True, fields=['created_at'], name='ledger_by_time'
                    ),
                ),
            ],
        ),
    ]
