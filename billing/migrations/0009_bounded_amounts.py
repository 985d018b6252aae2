import django.core.validators
from django.contrib.postgres.operations import AddConstraintNotValid
from django.db import migrations, models


class Migration(migrations.Migration):
    """Corrections are bounded from now on: those that stand in the books can be neither changed nor deleted."""

    dependencies = [
        ('billing', '0008_usage_by_time'),
    ]

    operations = [
        migrations.AlterField(
            model_name='price',
            name='micros_per_million',
            field=models.BigIntegerField(validators=[django.core.validators.MaxValueValidator(1000000000000, 'a price is at most 1,000,000,000,000 micro-units for a million tokens')]),
        ),
        AddConstraintNotValid(
            model_name='ledgerentry',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('kind__in', ['adjust', 'credit']), _negated=True), models.Q(('amount_micros__gte', -1000000000000000), ('amount_micros__lte', 1000000000000000)), _connector='OR'), name='ledger_correction_bounded'),
        ),
    ]
