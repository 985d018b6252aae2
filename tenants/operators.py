"""Operators: staff who hold a right. What an edit of policy or prices asks for, and what somebody lacks of it; knows no
page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.contrib.auth.models import User

from tenants.policy_changes import Change

MAY_EDIT_POLICY = "tenants.change_quotapolicy"
MAY_EDIT_PRICES = "billing.change_price"


def needed_for(edit: Sequence[Change], prices: Sequence[Change]) -> dict[str, str]:
    """The rights that an edit of these changes asks for, each with the word for what it is about."""
    needed = {MAY_EDIT_POLICY: "quotas"} if edit or not prices else {}
    return needed | ({MAY_EDIT_PRICES: "prices"} if prices else {})


def lack(username: str, rights: Mapping[str, str]) -> str:
    """Why they may not make an edit that asks for these rights, as it goes on after their name; "" where they may."""
    user = User.objects.filter(username=username).first()
    if user is None:
        return "has no account any more"
    if not user.is_active:
        return "has been switched off"
    if not user.is_staff:
        return "is no operator any more"
    missing = [subject for right, subject in rights.items() if not user.has_perm(right)]
    return f"may not change {' and '.join(missing)} any more" if missing else ""
