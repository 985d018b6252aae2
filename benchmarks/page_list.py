"""Every address that a person can visit, read off the URL configuration: a new page cannot be forgotten.

Knows names, parameters and an example for each parameter; refuses to know what a page is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.urls import URLPattern, URLResolver, get_resolver, reverse

NOT_FOR_PEOPLE = ("v1/organization/",)
NO_PAGES = {
    "admin:view_on_site": "leads to a model's own address, and no model of ours has one",
    "console-file": "a file",
    "console-statement": "a file",
    "live-csv": "a file",
    "live-explain": "plain data for the board",
    "mfa_deactivate_totp": "for who has a second factor, as those below",
    "mfa_download_recovery_codes": "a file",
    "mfa_generate_recovery_codes": "",
    "mfa_view_recovery_codes": "",
}
VIEWS_OF_USAGE = (("day", "class"), ("week", "key"), ("quarter", "key"), ("quarter", "project"))
Example = Callable[[], Any]  # a value for a parameter, or None where nothing of the kind exists


def addresses(examples: Mapping[str, Example]) -> dict[str, str]:
    """Path by name. Parameters that an example has no value for leave a page out: a history of nothing is none.

    Raises KeyError for a parameter of which no example is given.
    """
    found = {}
    for name, parameters in sorted(named_patterns()):
        if name in NO_PAGES:
            continue
        values = {one: _value(name, one, examples) for one in parameters}
        if None not in values.values():
            found[name] = reverse(name, kwargs=values)
    for span, by in VIEWS_OF_USAGE:
        found[f"console-usage, {span} by {by}"] = f"{found['console-usage']}?span={span}&by={by}"
    return found


def named_patterns(
    patterns: Sequence[URLPattern | URLResolver] | None = None, prefix: str = ""
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, parameters) of all that a person could type."""
    for one in get_resolver().url_patterns if patterns is None else patterns:
        if isinstance(one, URLResolver):
            if str(one.pattern) not in NOT_FOR_PEOPLE:
                yield from named_patterns(one.url_patterns, f"{one.namespace}:" if one.namespace else prefix)
        elif one.name is not None:
            yield prefix + one.name, tuple({**one.pattern.converters, **one.pattern.regex.groupindex})


def _value(name: str, parameter: str, examples: Mapping[str, Example]) -> Any:
    if parameter != "object_id":
        return examples[parameter]()
    models = {f"{one._meta.app_label}_{one._meta.model_name}": one for one in apps.get_models()}
    newest = models[name.removeprefix("admin:").rpartition("_")[0]]._default_manager.order_by("-pk").first()
    return None if newest is None else newest.pk
