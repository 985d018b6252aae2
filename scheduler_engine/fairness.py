"""Who has had how much of the device: exact charges, and the order of tenants inside a class.

Knows accounts, one per (class, tenant); refuses to know requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.metering import UNIT_BITS, UNITS_PER_US, Meter, Tab
from scheduler_engine.policy import PriorityClass, TenantClassPolicy

SERVICE_UNITS_PER_US = 1_000  # resolution of virtual service at weight 1

_DEFAULT_WEIGHT = 1


_HALF_WINDOW_US = 5_000_000


class TenantTotal:
    """One tenant over all classes. Always: ``weight`` is the largest of its classes' weights."""

    __slots__ = ("accounts", "charged_before_us", "charged_halfway_us", "num_live", "weight")

    def __init__(self) -> None:
        self.accounts: list[Account] = []
        self.num_live = 0
        self.weight = _DEFAULT_WEIGHT
        self.charged_before_us = 0  # up to the begin of the window
        self.charged_halfway_us = 0

    @property
    def charged_us(self) -> int:
        return sum(account.charged for account in self.accounts) >> UNIT_BITS


class Account(Tab):
    """One tenant in one class: a tab that also orders. Always: ``charged`` is exact, ``service`` never falls."""

    __slots__ = (
        "concurrency",
        "elsewhere_us",
        "hard_deadline_us",
        "num_live",
        "num_started",
        "priority_class",
        "service_base",
        "tenant_id",
        "total",
        "units_base",
        "weight",
    )

    def __init__(
        self,
        priority_class: PriorityClass,
        tenant_id: str,
        meter: Meter,
        total: TenantTotal | None = None,
    ) -> None:
        super().__init__(meter)
        self.priority_class = priority_class
        self.tenant_id = tenant_id
        self.total = TenantTotal() if total is None else total
        self.total.accounts.append(self)
        self.weight = _DEFAULT_WEIGHT
        self.concurrency: int | None = None
        self.hard_deadline_us: int | None = None
        self.service_base = 0  # ``service`` when ``charged`` stood at ``units_base``
        self.units_base = 0
        self.elsewhere_us: int | None = None  # device time on other workers, as last told
        self.num_live = 0  # waiting, running or suspended
        self.num_started = 0  # running or suspended

    @property
    def service(self) -> int:
        """Device time over weight, in SERVICE_UNITS_PER_US, from where it was last lifted or reweighted."""
        meter = self.meter  # as in ``charged``, in one go: this is read for tenant after tenant in every step
        units = self._base + self._num_rows * meter.per_row + self._offsets * meter.per_token - self.units_base
        return self.service_base + (units * SERVICE_UNITS_PER_US // self.weight >> UNIT_BITS)

    def lift(self, service: int) -> None:
        """Make its service no less than this; what follows is added at its weight of now."""
        self.service_base = max(self.service, service)
        self.units_base = self.charged

    def set_elsewhere(self, gpu_us: int) -> None:
        """Device time the tenant has had in the class on other workers, in all: what comes to it orders (v_local + G)
        and is charged there. What was had before the first telling is past; so is what a peer that begins anew forgot.
        """
        if self.elsewhere_us is not None:
            more_us = max(0, gpu_us - self.elsewhere_us)
            self.lift(self.service + more_us * SERVICE_UNITS_PER_US // self.weight)
        self.elsewhere_us = gpu_us

    @property
    def at_concurrency(self) -> bool:
        """True when one more running request would be over the tenant's cap."""
        return self.concurrency is not None and self.num_started >= self.concurrency


class FairnessAccountant:
    """Always: the tabs of all accounts sum to ``busy_us``, exactly; who wants nothing banks no credit."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        """``meters``: of the decodes of each class."""
        self.busy_us = 0
        self._meters = meters
        self.ceilings = [0 for _ in PriorityClass]  # no tenant with somebody on the device has had more service
        self._served_units = [0 for _ in PriorityClass]
        self._unreported_units = 0
        self._accounts: dict[tuple[PriorityClass, str], Account] = {}
        self._weights = [0 for _ in PriorityClass]
        self._levels = [0 for _ in PriorityClass]  # the most service that anybody had who left the device
        self._totals: dict[str, TenantTotal] = {}
        self._total_weight = 0  # of tenants with live requests
        self._turned_us = 0
        self._busy_before_us = 0
        self._busy_halfway_us = 0

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account(self, priority_class: PriorityClass, tenant_id: str) -> Account:
        """The account of a tenant in a class, made at its first request."""
        key = (priority_class, tenant_id)
        found = self._accounts.get(key)
        if found is None:
            total = self._totals.setdefault(tenant_id, TenantTotal())
            meter = self._meters[priority_class]
            found = self._accounts[key] = Account(priority_class, tenant_id, meter, total)
        return found

    def set_policies(self, cells: Mapping[tuple[PriorityClass, str], TenantClassPolicy]) -> None:
        """Take weights and caps of a new policy; what was charged stays."""
        for key, account in self._accounts.items():
            self.set_policy(account, cells.get(key))

    def set_policy(self, account: Account, cell: TenantClassPolicy | None) -> None:
        """Take the row of one account; None is the default row."""
        weight = _DEFAULT_WEIGHT if cell is None else cell.weight
        if account.num_live:
            self._weights[account.priority_class] += weight - account.weight
        if weight != account.weight:
            account.lift(account.service)
            account.weight = weight
        total = account.total
        heaviest = max(other.weight for other in total.accounts)
        if total.num_live:
            self._total_weight += heaviest - total.weight
        total.weight = heaviest
        account.concurrency = None if cell is None else cell.concurrency if cell.allowed else 0
        deadline_ms = None if cell is None else cell.hard_deadline_ms
        account.hard_deadline_us = None if deadline_ms is None else deadline_ms * 1_000

    def active_weight(self, rank: int) -> int:
        """Sum of the weights of tenants with live requests in the class."""
        return self._weights[rank]

    def is_over(self, account: Account, now_us: int) -> bool:
        """True when the tenant had more than its share, by weight, of the last five to ten seconds over all classes.

        O(1), but for each tenant once in five seconds.
        """
        if now_us - self._turned_us >= _HALF_WINDOW_US:
            self._turn_window(now_us)
        total = account.total
        had_us = total.charged_us - total.charged_before_us
        return had_us * self._total_weight > (self.busy_us - self._busy_before_us) * total.weight

    def _turn_window(self, now_us: int) -> None:
        self._turned_us = now_us
        self._busy_before_us, self._busy_halfway_us = self._busy_halfway_us, self.busy_us
        for total in self._totals.values():
            total.charged_before_us, total.charged_halfway_us = total.charged_halfway_us, total.charged_us

    def enter(self, account: Account) -> None:
        """One more live request."""
        if account.num_live == 0:
            self._weights[account.priority_class] += account.weight
        if account.total.num_live == 0:
            self._total_weight += account.total.weight
        account.num_live += 1
        account.total.num_live += 1

    def leave(self, account: Account) -> None:
        """One live request has ended."""
        account.num_live -= 1
        account.total.num_live -= 1
        if account.num_live == 0:
            self._weights[account.priority_class] -= account.weight
        if account.total.num_live == 0:
            self._total_weight -= account.total.weight

    def begin_to_wait(self, account: Account, least: Account | None, on_device: Iterable[Account]) -> None:
        """The tenant wants more than it has, after a time in which it did not. No credit for that time, and no place
        behind the others either: its service is lifted to just under ``least``, the least served who waits already.

        Where nobody waits, to the most that anybody had who is ``on_device`` or was there: what was had while nobody
        else wanted it is not held against those who had it.
        """
        if least is not None:
            account.lift(least.service - 1)
            return
        rank = account.priority_class
        if self.ceilings[rank] > account.service:
            self.ceilings[rank] = max((other.service for other in dict.fromkeys(on_device)), default=0)
        account.lift(max(self._levels[rank], self.ceilings[rank]))

    def serve(self, rank: int, units: int) -> int:
        """A class has had these units; in whole microseconds, of which the sum over time is rounded only once."""
        self.ceilings[rank] += 1 + (units * SERVICE_UNITS_PER_US >> UNIT_BITS)  # all of it to one, at weight 1
        before = self._served_units[rank]
        self._served_units[rank] = before + units
        return (before + units >> UNIT_BITS) - (before >> UNIT_BITS)

    def note_end(self, account: Account) -> None:
        """Somebody of the tenant leaves the device."""
        self._levels[account.priority_class] = max(self._levels[account.priority_class], account.service)

    def note_start(self, account: Account) -> None:
        """Somebody of the tenant comes to the device."""
        self.ceilings[account.priority_class] = max(self.ceilings[account.priority_class], account.service)

    def report(self, units: int) -> int:
        """A tab of a request that has ended in whole microseconds: what is cut off goes to the next that ends."""
        reported_us, self._unreported_units = divmod(self._unreported_units + units, UNITS_PER_US)
        return reported_us

    def charges_us(self) -> dict[Account, int]:
        """What each account was charged, in whole microseconds that sum to those charged in all."""
        charges: dict[Account, int] = {}
        units = 0
        for account in self._accounts.values():
            before, units = units, units + account.charged
            charges[account] = (units >> UNIT_BITS) - (before >> UNIT_BITS)
        return charges

    @property
    def charged_us(self) -> int:
        return sum(account.charged for account in self._accounts.values()) >> UNIT_BITS

    def check_books(self) -> None:
        """Raises BrokenBooks unless every busy microsecond is somebody's."""
        if sum(account.charged for account in self._accounts.values()) != self.busy_us << UNIT_BITS:
            raise BrokenBooks(f"charged {self.charged_us} us of {self.busy_us} us busy")
        for rank, weight in enumerate(self._weights):
            expected = sum(a.weight for a in self._accounts.values() if a.num_live and a.priority_class == rank)
            if weight != expected:
                raise BrokenBooks(f"active weight of class {rank} is {weight}, counted {expected}")
        total_weight = sum(total.weight for total in self._totals.values() if total.num_live)
        if total_weight != self._total_weight:
            raise BrokenBooks(f"active weight of all tenants is {self._total_weight}, counted {total_weight}")
