from django.db import migrations, models

_KEY = "tenant_id, hour, project_id, key_id, priority_class, model, is_charged"
_SUMS = "num_requests, prompt_tokens, cached_tokens, output_tokens, cost_micros, num_downgraded"


def _anew(is_charged: str) -> tuple[str, ...]:
    """All roll-ups from the ledger; ``is_charged`` as SQL of an entry."""
    return (
        "DELETE FROM billing_rollup",
        f"""
        INSERT INTO billing_rollup ({_KEY}, {_SUMS})
        SELECT tenant_id, date_trunc('hour', created_at, 'UTC'), project_id, key_id, priority_class, model,
               {is_charged}, count(*), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), sum(amount_micros),
               count(nullif(requested_class, ''))
        FROM billing_ledgerentry
        WHERE kind IN ('settle', 'release') AND attempt IS NOT NULL
        GROUP BY 1, 2, 3, 4, 5, 6, 7
        """,
    )


def _walls_of_the_owner(are_forced: bool) -> tuple[str, ...]:
    """Forced row security hides all rows from the owner too, who migrates. The ledger first, as settlers lock them."""
    return tuple(
        f"ALTER TABLE {table} {'' if are_forced else 'NO '}FORCE ROW LEVEL SECURITY"
        for table in ("billing_ledgerentry", "billing_rollup")
    )


class Migration(migrations.Migration):
    """Use that is charged to nobody gets rows of its own: all roll-ups are made anew, in this one transaction."""

    dependencies = [
        ("billing", "0011_corrections_by_tenant"),
        ("tenants", "0011_prices_in_proposals"),
    ]

    operations = [
        migrations.RunSQL(_walls_of_the_owner(False), _walls_of_the_owner(True)),
        migrations.RemoveConstraint(model_name="rollup", name="rollup_one_row"),
        migrations.AddField(
            model_name="rollup",
            name="is_charged",
            field=models.BooleanField(db_default=True, default=True, help_text="no: used, and charged to nobody"),
        ),
        migrations.AlterField(
            model_name="statement",
            name="lines",
            field=models.JSONField(help_text="sums by project, key, class, model and price list"),
        ),
        migrations.AddConstraint(
            model_name="rollup",
            constraint=models.UniqueConstraint(
                fields=["tenant", "hour", "project_id", "key_id", "priority_class", "model", "is_charged"],
                name="rollup_one_row",
                nulls_distinct=False,
            ),
        ),
        migrations.RunSQL(_anew("kind = 'settle'"), _anew("true")),
        migrations.RunSQL(_walls_of_the_owner(True), _walls_of_the_owner(False)),
    ]
