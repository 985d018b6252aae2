"""The Bus on Redis or Valkey: the only place in ``wire`` that imports redis. What lies where: ``wire.redis_keys``.

Commands are retried once on a fresh connection, then the caller gets BusError: while Redis is gone everybody fails
closed.
Whatever must be true at once is one Lua script; the files beside this one are their text.
"""

from wire.redis_bus.connection import bus_errors, connect, connect_async
from wire.redis_bus.gateway_side import RedisGatewayBus
from wire.redis_bus.line import Unreachable
from wire.redis_bus.policy import write_policy
from wire.redis_bus.usage_reader import RedisUsageReader
from wire.redis_bus.worker_side import RedisWorkerBus
from wire.redis_keys import Keys

__all__ = [
    "Keys",
    "RedisGatewayBus",
    "RedisUsageReader",
    "RedisWorkerBus",
    "Unreachable",
    "bus_errors",
    "connect",
    "connect_async",
    "write_policy",
]
