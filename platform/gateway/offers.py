"""What an ask is under the policy: its terms in each class that may serve it, and of those a wish and a Submit.

Knows prices, quotas, deadlines and what workers said; refuses to know what limits hold now and how work is handed over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from billing.pricing import TokenPrices
from gateway import dispatch
from gateway.admission import Wish, new_response_id
from gateway.asking import TIER_OF_CLASS, Ask, effective_max_tokens, encode_prompt, grammar_fault, requested_class
from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.policy_feed import PolicyView
from gateway.text import Text
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import LoadSnapshot, Submit


@dataclass(frozen=True, slots=True)
class Terms:
    """What the policy says to this ask in one class. ``asked`` is the class that the caller wants."""

    priority_class: PriorityClass
    asked: PriorityClass
    quota: TenantClassPolicy
    prices: TokenPrices
    view: PolicyView

    @property
    def requested_class(self) -> PriorityClass | None:
        """None where it is this one."""
        return None if self.asked is self.priority_class else self.asked


@dataclass(frozen=True, slots=True)
class Offer:
    """A response in one class: what it takes of the limits, and what a worker is told. Both name the same response."""

    wish: Wish
    submit: Submit
    num_cache_tokens: int

    @property
    def priority_class(self) -> PriorityClass:
        return self.wish.priority_class


@dataclass(frozen=True, slots=True)
class Prepared:
    """An ask with what is the same in every class."""

    caller: Caller
    ask: Ask
    text: Text
    prompt: tuple[int, ...]
    response_id: str
    gateway_id: str
    elapsed_us: int
    is_kept: bool


def terms_of(view: PolicyView, caller: Caller, ask: Ask, only: PriorityClass | None = None) -> list[Terms] | Refusal:
    """In the class asked for, and then in the one that serves what does not fit there: one step down, never two; or in
    ``only`` one of them.

    A class that is not granted, or paused, sends nobody down: it refuses.
    """
    asked = requested_class(caller, ask)

    def terms(priority_class: PriorityClass) -> Terms | None:
        quota = view.quota(caller.tenant_id, priority_class)
        prices = view.prices.get((ask.model, priority_class))
        return None if quota is None or prices is None else Terms(priority_class, asked, quota, prices, view)

    own = terms(asked)
    if own is None:
        tier = TIER_OF_CLASS[asked]
        message = f"Class {asked.label} (service tier {tier!r}) is paused or not granted to this tenant."
        return Refusal(reason=Reason.CLASS_NOT_ALLOWED, message=message, param="service_tier")
    lower = None if own.quota.overflow_to is None else terms(own.quota.overflow_to)
    found = [own] if lower is None else [own, lower]
    if only is None:
        return found
    return [terms for terms in found if terms.priority_class is only] or Refusal(
        reason=Reason.CLASS_NOT_ALLOWED,
        message=f"Class {only.label} served the first of this request, and may not serve the rest any more.",
        param="service_tier",
    )


class Offers:
    """What the platform can do for an ask now, by what workers said of themselves last."""

    def __init__(
        self,
        texts: Mapping[str, Text],
        loads: Callable[[], Sequence[LoadSnapshot]],
        gateway_id: str,
        now_ms: Callable[[], int],
        clock_s: Callable[[], float],
    ) -> None:
        self._texts = texts
        self._loads = loads
        self._gateway_id = gateway_id
        self._now_ms = now_ms
        self._clock_s = clock_s

    async def bundles(
        self, caller: Caller, asks: Sequence[Ask], terms: Sequence[Terms], *, is_kept: bool
    ) -> Sequence[Sequence[Offer]] | Refusal:
        """All of them in the first of the classes, and in the next where it can serve them. Refuses what the first
        cannot: the platform's want of room, and a wrong ask, go no class down.
        """
        choices = self._choices(asks[0], terms)
        if isinstance(choices, Refusal):
            return choices
        unable = await grammar_fault(asks[0].sampling.grammar, asks[0].grammar_param)
        if unable is not None:
            return unable
        text, prepared = self._texts[asks[0].model], []
        for ask in asks:
            prompt = await encode_prompt(text, ask, min(text.context_length, choices[0][1].max_model_len))
            if isinstance(prompt, Refusal):
                return prompt
            prepared.append(self._prepared(caller, ask, prompt, is_kept=is_kept))
        bundles: list[list[Offer]] = []
        for one, choice in choices:
            made = [offer(each, one, choice) for each in prepared]
            refusals = [found for found in made if isinstance(found, Refusal)]
            if refusals and not bundles:
                return refusals[0]
            if not refusals:
                bundles.append([found for found in made if isinstance(found, Offer)])
        return bundles

    def _prepared(self, caller: Caller, ask: Ask, prompt: tuple[int, ...], *, is_kept: bool) -> Prepared:
        return Prepared(
            caller=caller,
            ask=ask,
            text=self._texts[ask.model],
            prompt=prompt,
            response_id=ask.response_id or new_response_id(self._now_ms(), os.urandom(10)),
            gateway_id=self._gateway_id,
            elapsed_us=int((self._clock_s() - ask.received_at_s) * 1_000_000),
            is_kept=is_kept,
        )

    def _choices(self, ask: Ask, terms: Sequence[Terms]) -> list[tuple[Terms, dispatch.Choice]] | Refusal:
        """The first of the classes with a worker, and those of the others that have one too."""
        found: list[tuple[Terms, dispatch.Choice]] = []
        for one in terms:
            choice = dispatch.choose(self._loads(), ask.model, one.priority_class, also_closed=ask.is_return)
            if not isinstance(choice, Refusal):
                unable = dispatch.beyond(choice, ask.sampling, ask.grammar_param)
                choice = unable or choice
            if not isinstance(choice, Refusal):
                found.append((one, choice))
            elif not found:
                return choice
        return found


def offer(prepared: Prepared, terms: Terms, choice: dispatch.Choice) -> Offer | Refusal:
    """Refuses what this class's own number of tokens cannot be."""
    context_length = min(prepared.text.context_length, choice.max_model_len)
    max_tokens = effective_max_tokens(prepared.ask, terms.quota, len(prepared.prompt), context_length)
    if isinstance(max_tokens, Refusal):
        return max_tokens
    wish = _wish(prepared, terms, choice, max_tokens)
    return Offer(wish, _submit(prepared, terms, wish, max_tokens), choice.num_cache_tokens)


def _wish(prepared: Prepared, terms: Terms, choice: dispatch.Choice, max_tokens: int) -> Wish:
    caller, ask = prepared.caller, prepared.ask
    return Wish(
        response_id=prepared.response_id,
        gateway_id=prepared.gateway_id,
        worker_id=choice.worker_id,
        epoch=choice.epoch,
        is_kept=prepared.is_kept,
        tenant_id=caller.tenant_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        priority_class=terms.priority_class,
        requested_class=terms.requested_class,
        model=ask.model,
        source=ask.source,
        prompt_tokens=len(prepared.prompt),
        max_tokens=max_tokens * ask.num_choices,
        quota=terms.quota,
        prices=terms.prices,
        zone=terms.view.zone(caller.tenant_id),
        policy_version=terms.view.version,
        price_version=terms.view.price_version,
        may_wait=ask.max_queue_wait_ms is not None,
    )


def _submit(prepared: Prepared, terms: Terms, wish: Wish, max_tokens: int) -> Submit:
    ask = prepared.ask

    def remaining_us(*deadlines_ms: int | None) -> int | None:
        given = [deadline_ms * 1_000 for deadline_ms in deadlines_ms if deadline_ms is not None]
        return max(1, min(given) - prepared.elapsed_us) if given else None

    class_policy = terms.view.snapshot.classes[terms.priority_class]
    return Submit(
        response_id=wish.response_id,
        attempt=1,
        gateway_id=wish.gateway_id,
        tenant_id=wish.tenant_id,
        project_id=wish.project_id,
        key_id=wish.key_id,
        priority_class=terms.priority_class,
        requested_class=terms.requested_class,
        model=ask.model,
        prompt_token_ids=prepared.prompt,
        worker_epoch=wish.epoch,
        num_choices=ask.num_choices,
        sampling=ask.sampling,
        max_tokens=max_tokens,
        min_tokens=ask.min_tokens,
        stop_token_ids=() if ask.ignore_eos else prepared.text.stop_token_ids,
        stop_strings=tuple(stop.encode() for stop in ask.stop),
        remaining_first_token_us=remaining_us(ask.deadline_ms),
        remaining_hard_deadline_us=remaining_us(
            ask.deadline_ms, terms.quota.hard_deadline_ms, class_policy.hard_deadline_ms
        ),
        remaining_completion_us=remaining_us(ask.completion_deadline_ms),
        is_return=ask.is_return,
        max_queue_wait_us=remaining_us(ask.max_queue_wait_ms),
        value_micros=terms.quota.value_micros,
        cache_salt=wish.tenant_id,
        policy_version=wish.policy_version,
        price_version=wish.price_version,
    )
