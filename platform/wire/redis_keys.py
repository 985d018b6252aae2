"""Names and shapes of everything the platform keeps in Redis (or Valkey), in one place. Refuses to know a client.

Every name stands behind a prefix, ``rubato:`` unless a test says otherwise.

======================  =======  =======================================================================================
``workers``             set      ids of workers that ever opened; ``gateways``: of gateways with a heartbeat
``worker:{id}:epoch``   string   integer epoch, or ``fenced:<epoch>``; absent = never opened
``worker:{id}:inbox``   stream   gateway -> worker; emptied by ``open`` in the same script that takes the new epoch
``worker:{id}:load``    string   LoadSnapshot, TTL 2 s: the worker's heartbeat (EXISTS = alive)
``worker:{id}:sent``    string   number of this epoch's last committed publish: a repeated one is not seen twice
``worker:{id}:counted`` hash     ``{epoch}:prompt``, ``{epoch}:output``: tokens of all committed Usage; those of
                                 responses that had ended before as ``{epoch}:rework_prompt``, ``…:rework_output``
``gateway:{id}:alive``  string   TTL 9 s, set by ``heartbeat`` (call it every 2 s): EXISTS = alive
``gateway:{id}:outbox`` stream   worker -> gateway, one entry = all of one step for that gateway; TTL 10 min
``usage``               stream   durable: Reserved (admit script), Usage (publish), Released; consumer group ``settler``
``response:{id}``       hash     the record of one response, below
``card:{tenant}:{id}``  string   what any gateway needs to go on with a response or to show it; lives as its record.
                                 With the tenant in its name another one's is looked for in vain, as fast as none
``background``          set      ids of responses that go on without a reader; cleaned by whoever looks
``idempotency:{t}:{k}`` hash     an answer under an Idempotency-Key of tenant t, or the operation that will have it and
                                 who is at work on it, 24 h; k is a digest of the key
``moved:{id}``          string   a response was taken from a living gateway, TTL 2 s: not again before
``calls:{t}:{minute}``  string   calls of tenant t to files and batches in that minute since 1970, TTL 2 min
``output:{id}``         string   a finished response: its end and token ids per choice, TTL 10 min
``books``               string   JSON of the last comparison of engines, ledger and roll-ups, TTL 10 min
``gate:built``          string   when the gate was built from the books; absent = Redis is new or lost: nobody gets in
``policy:current``      string   JSON {"version": 7, "policy": snapshot_to_dict(...), other keys the worker ignores}
``policy:version``      string   the version alone, for cheap polls; ``write_policy`` writes both, never backwards
``policy:changed``      channel  pinged with the version by ``write_policy``; everybody polls every 500 ms too
======================  =======  =======================================================================================

Body of every stream entry: one field ``m`` = ``wire.codec.encode([...messages])``.

**The record** ``response:{id}`` is written by the gateway's admit script and ended by ``settle.lua``: inside
``publish`` for a Usage, inside ``append_usage`` for a Released. Lists are JSON text, keys in them full names with
prefix, amounts integers:

- ``state`` open | done; ``gateway``, ``worker`` (may be set later, at dispatch), ``attempt``, ``tenant``, ``cls``
  (label)
- ``epoch`` of that worker; ``card``: key of its card, where one is kept: it expires with the record
- ``lease_keys`` ["key", ...]: sorted sets; the end does ZREM key response_id
- ``token_refunds`` [["key", reserved], ...]: token buckets, hashes with ``level`` (whole tokens left) and ``capacity``;
  the end does level = min(capacity, level + reserved - used), used = charged prompt + output tokens.
  A bucket that is gone (expired = full) is left alone.
- ``request_refunds`` [["key", 1], ...]: the same, whole, and only when the response was refused (``shed`` or Released)
- ``money_keys`` ["key", ...]: hashes of a money window; the end does HINCRBY open -money_reserved, settled +cost
- ``money_reserved`` micros; ``price_prompt``, ``price_cached``, ``price_output``: micros per million tokens, as
  reserved
- written by the end: ``state`` done, ``terminal``, ``prompt_tokens``, ``cached_tokens``, ``output_tokens``,
  ``cost_micros``; then EXPIRE 600

cost = ceil(((prompt - cached) * price_prompt + cached * price_cached + output * price_output) / 1,000,000), once per
response; 0 for ``shed``, ``failed_platform``, ``expired`` and Released, whose tokens go back to the buckets whole.
The end is idempotent by ``state`` and takes only the record's current ``attempt``. A Usage that comes after it (a
Released crossed a Submit on its way to the worker's next epoch) is rework: it changes neither record nor ledger.

**The gate**, per tenant id and class label: buckets ``limit:{tenant}:{class}:{kind}``, leases
``lease:{tenant}:{class}``, money windows ``money:{tenant}:{class}:{window id}``. Records, leases and windows are built
from the books by one gateway (rebuild.lua) whenever ``gate:built`` is absent; deleting it has them built anew.

**Lost workers.** A gateway remembers the epoch it saw in the LoadSnapshot when it sent a Submit. Another epoch later,
or no load for 2 s and then a successful ``fence``, means: drain the outbox once more; what has not ended is lost with
its worker (Released, or a new dispatch with attempt + 1).

**Batches.** A Finished lies in the same entry as its last Tokens, behind them: look at the whole batch before showing
text, since ``ChoiceEnd.visible_bytes`` may cut it.
"""

from __future__ import annotations

from dataclasses import dataclass

USAGE_GROUP = "settler"
ENTRY_FIELD = b"m"
LOAD_LIFETIME_MS = 2_000
GATEWAY_LIFETIME_MS = 9_000  # with a worker's looks and its grace: what a killed gateway held is free after 15 s
DONE_LIFETIME_S = 600
BOOKS_LIFETIME_S = 600
OUTBOX_LIFETIME_S = 600
POLICY_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds every name. Always: two prefixes never share a key."""

    prefix: str = "rubato:"

    @property
    def workers(self) -> str:
        return f"{self.prefix}workers"

    @property
    def gateways(self) -> str:
        return f"{self.prefix}gateways"

    @property
    def usage(self) -> str:
        return f"{self.prefix}usage"

    @property
    def gate_built(self) -> str:
        return f"{self.prefix}gate:built"

    @property
    def books(self) -> str:
        return f"{self.prefix}books"

    def bucket(self, tenant_id: str, label: str, kind: str) -> str:
        return f"{self.prefix}limit:{tenant_id}:{label}:{kind}"

    def lease(self, tenant_id: str, label: str) -> str:
        return f"{self.prefix}lease:{tenant_id}:{label}"

    def money(self, tenant_id: str, label: str, window_id: str) -> str:
        return f"{self.prefix}money:{tenant_id}:{label}:{window_id}"

    @property
    def policy_current(self) -> str:
        return f"{self.prefix}policy:current"

    @property
    def policy_version(self) -> str:
        return f"{self.prefix}policy:version"

    @property
    def policy_changed(self) -> str:
        return f"{self.prefix}policy:changed"

    def epoch(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}:epoch"

    def inbox(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}:inbox"

    def load(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}:load"

    def sent(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}:sent"

    def counted(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}:counted"

    def alive(self, gateway_id: str) -> str:
        return f"{self.prefix}gateway:{gateway_id}:alive"

    def outbox(self, gateway_id: str) -> str:
        return f"{self.prefix}gateway:{gateway_id}:outbox"

    def response(self, response_id: str) -> str:
        return f"{self.prefix}response:{response_id}"

    def card(self, tenant_id: str, response_id: str) -> str:
        return f"{self.prefix}card:{tenant_id}:{response_id}"

    @property
    def background(self) -> str:
        return f"{self.prefix}background"

    def moved(self, response_id: str) -> str:
        return f"{self.prefix}moved:{response_id}"

    def calls(self, tenant_id: str, minute: int) -> str:
        return f"{self.prefix}calls:{tenant_id}:{minute}"

    def idempotency(self, tenant_id: str, key_digest: str) -> str:
        return f"{self.prefix}idempotency:{tenant_id}:{key_digest}"

    def output(self, response_id: str) -> str:
        return f"{self.prefix}output:{response_id}"
