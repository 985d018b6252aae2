"""The Bus on Redis or Valkey: the only file of ``wire`` that imports redis. Refuses to know limits and prices.

Key layout (every name stands behind a prefix, ``rubato:`` unless a test says otherwise; build names with ``Keys``):

=====================  ==========  ==================================================================================
``workers``            set         ids of workers that ever opened; ``gateways`` likewise
``worker:{id}:epoch``  string      integer epoch, or ``fenced:<epoch>``; absent = never opened
``worker:{id}:inbox``  stream      gateway -> worker, one message per entry; emptied by ``open`` (same script as the new epoch)
``worker:{id}:load``   string      LoadSnapshot, TTL 2 s: the worker's heartbeat (EXISTS = alive)
``worker:{id}:sent``   string      number of the last committed publish of this epoch: a repeated publish is not seen twice
``gateway:{id}:alive`` string      TTL 15 s, set by ``heartbeat`` (call it every 2 s): EXISTS = alive
``gateway:{id}:outbox`` stream     worker -> gateway, one entry per step = all of that step for that gateway; TTL 10 min
``usage``              stream      durable: Reserved (admit script), Usage (publish), Released (release); group ``settler``
``response:{id}``      hash        the record of one response, below
``output:{id}``        string      finished token ids per choice, TTL 10 min
``policy:current``     string      JSON {"version": 7, "policy": snapshot_to_dict(…), …other keys the worker ignores}
``policy:version``     string      the version alone, so that a poll is cheap. Write both with ``write_policy``
``policy:changed``     channel     pinged with the version by ``write_policy``; everybody also polls every 500 ms
=====================  ==========  ==================================================================================

Body of every stream entry: one field ``m`` = ``wire.codec.encode([...messages])``.

**The record** ``response:{id}`` is written by the gateway's admit script and ended by ``settle.lua`` (inside ``publish`` for a
Usage, inside ``append_usage`` for a Released). All lists are JSON text, all keys in them full names with prefix, amounts integers:

- ``state`` "open" | "done"; ``gateway``, ``worker`` (may be set later, at dispatch), ``attempt``, ``tenant``, ``cls`` (label)
- ``lease_keys``      ["key", …]            sorted sets; the end does ZREM key response_id
- ``token_refunds``   [["key", reserved], …] token buckets: hashes with ``level`` (tokens left, may have a fraction) and ``capacity``;
                      the end does level = min(capacity, level + reserved - used), used = charged prompt + output tokens.
                      A bucket that is gone (expired = full) is left alone.
- ``request_refunds`` [["key", 1], …]        the same, given back only when the response was refused (terminal ``shed`` or Released)
- ``money_keys``      ["key", …]            hashes of a money window; the end does HINCRBY open -money_reserved, settled +cost
- ``money_reserved``  micros; ``price_prompt``, ``price_cached``, ``price_output`` micros per million tokens, at the reserved version
- written by the end: ``state`` = done, ``terminal``, ``prompt_tokens``, ``cached_tokens``, ``output_tokens``, ``cost_micros``; EXPIRE 600

cost = ceil(((prompt - cached) * price_prompt + cached * price_cached + output * price_output) / 1,000,000), once per response;
0 for ``shed``, ``failed_platform``, ``expired`` and Released, whose tokens also go back to the buckets whole.
The end is idempotent by ``state`` and takes only the record's current ``attempt``.

**Lost workers.** A gateway remembers the epoch it saw in the LoadSnapshot when it sent a Submit. Another epoch later, or no load for
2 s and a successful ``fence``, means: drain the outbox once more, then the response is lost with its worker (Released or re-dispatch).
**Batches.** A Finished lies in the same entry as its last Tokens, after them: look at the whole batch before showing text, since
``ChoiceEnd.visible_bytes`` may cut it.
"""
