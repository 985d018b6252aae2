"""An operation that has ended, shown to a handler as if it had just been let in with all its tokens there already.

Refuses to know limits and workers: nobody is let in any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.admission import Grant, Limits
from gateway.asking import Ask, effective_max_tokens, encode_prompt
from gateway.auth import Caller
from gateway.door import Entered
from gateway.policy_feed import PolicyFeed
from gateway.response_stream import ResponseStream
from gateway.text import Text
from scheduler_engine.policy import PriorityClass
from wire.bus import FinishedOutput
from wire.messages import Submit


async def shown_again(
    texts: Mapping[str, Text],
    policy: PolicyFeed,
    caller: Caller,
    ask: Ask,
    priority_class: PriorityClass,
    output: FinishedOutput,
) -> Entered:
    """``ask`` as it was asked before, ``output`` what came of it. It is in nobody's books any more."""
    text = texts[ask.model]
    prompt = await encode_prompt(text, ask, text.context_length)
    token_ids = prompt if isinstance(prompt, tuple) else ()
    stream = _stream_before(ask, caller, priority_class, token_ids, output)
    return Entered(
        stream=stream,
        reader=stream.read(),
        text=text,
        limits=stream.grant.limits,
        priority_class=priority_class,
        prompt_tokens=output.finished.prompt_tokens,
        max_tokens=_max_tokens(policy, ask, caller, priority_class, output, text.context_length),
    )


def _max_tokens(
    policy: PolicyFeed,
    ask: Ask,
    caller: Caller,
    priority_class: PriorityClass,
    output: FinishedOutput,
    context_length: int,
) -> int:
    """As it was reserved, where the policy still says the same."""
    view = policy.view
    quota = None if view is None else view.quota(caller.tenant_id, priority_class)
    prompt_tokens = output.finished.prompt_tokens
    found = None if quota is None else effective_max_tokens(ask, quota, prompt_tokens, context_length)
    return found if isinstance(found, int) else output.finished.output_tokens


def _stream_before(
    ask: Ask, caller: Caller, priority_class: PriorityClass, prompt: tuple[int, ...], output: FinishedOutput
) -> ResponseStream:
    response_id = output.finished.response_id
    submit = Submit(
        response_id=response_id,
        attempt=output.finished.attempt,
        gateway_id="",
        tenant_id=caller.tenant_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        priority_class=priority_class,
        model=ask.model,
        prompt_token_ids=prompt,
        sampling=ask.sampling,
        num_choices=ask.num_choices,
    )
    grant = Grant(response_id, caller.tenant_id, "", Limits(priority_class))
    stream = ResponseStream(grant, submit, ("", 0), time.monotonic)
    for choice, token_ids in enumerate(output.token_ids):
        stream.take(choice, 0, token_ids)
    stream.finish(output.finished)
    return stream
