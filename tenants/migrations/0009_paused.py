from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0008_overflow'),
    ]

    operations = [
        migrations.AddField(
            model_name='quotapolicy',
            name='is_paused',
            field=models.BooleanField(db_default=False, default=False, editable=False, help_text='granted, and let nobody in for the moment'),
        ),
        migrations.AddConstraint(
            model_name='quotapolicy',
            constraint=models.CheckConstraint(condition=models.Q(('allowed', False), ('is_paused', False), _connector='OR'), name='quota_paused_lets_nobody_in'),
        ),
    ]
