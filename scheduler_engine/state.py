"""Everything the engine owns, and the moves of a request between its states.

Each move keeps all books at once; refuses to decide which move is right.
"""

from __future__ import annotations

import heapq

from scheduler_engine.blocks import BlockPool
from scheduler_engine.calibration import WaitCalibration
from scheduler_engine.checkpoints import Checkpoints
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants, FittedCost
from scheduler_engine.draft import CopyCharge, Draft, Outbox
from scheduler_engine.entry import TenantMix
from scheduler_engine.events import FinishReason, Lever, Preempted, Rejected, RejectReason, Resource
from scheduler_engine.fairness import SERVICE_UNITS_PER_US, Account, FairnessAccountant
from scheduler_engine.floors import Floors
from scheduler_engine.governor import Governor
from scheduler_engine.headroom import Headroom
from scheduler_engine.journal import Journal
from scheduler_engine.lengths import LengthHistory
from scheduler_engine.live import IN_LINE, IN_SLOT, ON_DEVICE, SUSPENDED, WITHOUT_KV, LiveRequest, State
from scheduler_engine.overload import Overload
from scheduler_engine.peak import PeakBook
from scheduler_engine.plan import BlockCopy
from scheduler_engine.policy import ClassPolicy, PolicySnapshot, PriorityClass, TenantClassPolicy
from scheduler_engine.prefix_cache import PrefixPool
from scheduler_engine.queues import ClassQueue
from scheduler_engine.request import RequestId
from scheduler_engine.returns import ReturnBook
from scheduler_engine.running import RunningSet
from scheduler_engine.standing import begin_to_wait, come_back
from scheduler_engine.tally import Tally
from scheduler_engine.value import ValueLevels

_KEEPS_KV = (State.HELD, State.ON_HOST)


class EngineState:
    """Always: a live request is in exactly one place: a queue (waiting, held, on host, dropped), a slot, or behind a
    fence; its blocks are where its state says.
    """

    def __init__(self, config: EngineConfig, policy: PolicySnapshot, cost: CostConstants) -> None:
        self.config = config
        self.cost = FittedCost(cost, config.bytes_per_block)
        self.device = PrefixPool("device", config.num_blocks)
        self.host = BlockPool("host", config.num_host_blocks)
        self.checkpoints = Checkpoints()
        self.lives: dict[RequestId, LiveRequest] = {}
        self.fences: dict[RequestId, RequestId | None] = {}  # whose copy out is unfinished -> for whom
        self.queues = tuple(ClassQueue() for _ in PriorityClass)
        self.running = RunningSet(config.block_size)
        self.peak = PeakBook(config.block_size)
        self.lengths = tuple(LengthHistory() for _ in PriorityClass)
        self.calibrations = tuple(WaitCalibration() for _ in PriorityClass)
        self.accountant = FairnessAccountant([seats.meter for seats in self.running.seats])
        self.overload = Overload()
        self.floors = Floors(self.overload)
        self.governor = Governor(config.num_slots)
        self.headroom = Headroom(config.num_blocks)
        self.values = tuple(ValueLevels() for _ in PriorityClass)
        self.returns = tuple(ReturnBook() for _ in PriorityClass)
        self.mixes = tuple(TenantMix() for _ in PriorityClass)
        self.tally = Tally()
        self.outbox = Outbox()
        self.timers: list[tuple[int, int, RequestId]] = []
        self.num_lives = [0 for _ in PriorityClass]
        self.num_suspended = [0 for _ in PriorityClass]
        self.last_active_us: list[int | None] = [None for _ in PriorityClass]
        self.owed_rank: int | None = None  # a class whose head found no room although it is owed its floor
        self.draining = False
        self.step = 0
        self.now_us = 0  # of the plan being made
        self.journal = Journal(self)
        self.set_policy(policy)

    def set_policy(self, policy: PolicySnapshot) -> None:
        self.policy = policy
        self.classes: tuple[ClassPolicy, ...] = policy.classes
        self.widest_step = max(each.token_budget_max for each in policy.classes)
        self.cells: dict[tuple[PriorityClass, str], TenantClassPolicy] = {
            (cell.priority_class, cell.tenant_id): cell for cell in policy.tenants
        }
        self.accountant.set_policies(self.cells)
        for queue in self.queues:
            queue.forget_first()
            for account in queue.tenants():
                come_back(self, account)
                queue.park(account)

    def account(self, priority_class: PriorityClass, tenant_id: str) -> Account:
        account = self.accountant.account(priority_class, tenant_id)
        if account.num_live == 0:
            self.accountant.set_policy(account, self.cells.get((priority_class, tenant_id)))
        return account

    def held_blocks(self) -> list[int]:
        """Device blocks by class, those of batch left out: nobody is below it. O(their requests on the device)."""
        above = (PriorityClass.INTERACTIVE, PriorityClass.DEFAULT)
        return [*(sum(len(live.block_table) for live in self.running.on_device(rank)) for rank in above), 0]

    def has_work(self, rank: int) -> bool:
        """True when the class has a request anywhere."""
        return self.num_lives[rank] > 0

    def memory_cap(self, live: LiveRequest) -> int:
        """Blocks up to which the class may plan; a request that was let in under a wider policy still fits alone."""
        cap = self.config.num_blocks * self.classes[live.rank].cap_memory_percent // 100
        return max(cap, self.config.num_blocks_for(live.finish_total))

    def service_gap(self, rank: int) -> int:
        """The fairness gap B of the class, in units of virtual service."""
        return self.classes[rank].fairness_gap_ms * 1_000 * SERVICE_UNITS_PER_US

    def slot_cap(self, rank: int) -> int:
        """Slots that the class may have at once."""
        return max(1, self.config.num_slots * self.classes[rank].cap_slots_percent // 100)

    def wake_at(self, at_us: int, live: LiveRequest) -> None:
        heapq.heappush(self.timers, (at_us, live.sequence_number, live.request_id))

    def estimate_total(self, live: LiveRequest) -> None:
        """Set where the request is expected to end."""
        num_output = len(live.output_ids)
        expected = self.lengths[live.rank].estimate(num_output=num_output, limit=live.finish_total - live.prompt_len)
        live.estimated_total = max(live.total, live.prompt_len + expected)

    def set_next_check(self, live: LiveRequest) -> None:
        """At its limit or its estimate it is looked at again; after its first token in any case."""
        total = live.total
        estimate = live.estimated_total if live.estimated_total > total and live.output_ids else total + 1
        self.running.check_at(live, min(live.finish_total, estimate))

    def estimate_gpu(self, live: LiveRequest) -> None:
        """Set how much device time it is expected to take from here to its end."""
        computed, total = live.computed, live.total
        prefill = 0 if live.state in _KEEPS_KV else total - computed
        cost_ns = self.cost.request_ns(start=computed, prefill=prefill, output=max(0, live.estimated_total - total))
        live.estimated_gpu_us = max(1, cost_ns // 1_000)

    def enqueue(self, live: LiveRequest) -> None:
        """It waits, for its start or to go on."""
        self.estimate_gpu(live)
        self.line_up(live)

    def line_up(self, live: LiveRequest) -> None:
        """The same for one whose device time has just been estimated."""
        begin_to_wait(self, live.account)
        self.queues[live.rank].push(live)

    def borrow_prefix(self, live: LiveRequest) -> None:
        """While a request with nothing of its own is tried for a start it owns what the cache has of its prefix. The
        last token is computed in any case: nothing is drawn without.
        """
        if live.prefix_keys and live.state in WITHOUT_KV:
            most = (live.total - 1) // self.config.block_size
            live.block_table = self.device.borrow(live.prefix_keys[:most])
            live.computed = len(live.block_table) * self.config.block_size

    def return_prefix(self, live: LiveRequest) -> None:
        """It was not let in."""
        if live.prefix_keys and live.state in WITHOUT_KV:
            self.device.give(live.block_table)
            live.block_table = []
            live.computed = 0

    def publish_prefix(self, live: LiveRequest) -> None:
        """Blocks that are full by now, and have a name, can be found by others."""
        keys = live.prefix_keys
        for index in range(live.num_published, min(len(keys), live.computed // self.config.block_size)):
            self.device.publish(live.block_table[index], keys[index])
            live.num_published = index + 1

    def start(self, live: LiveRequest, draft: Draft, *, num_blocks: int) -> None:
        """Out of the queue into a slot, with ``num_blocks`` new device blocks; from the host its KV is copied back
        first.
        """
        self.queues[live.rank].remove(live)
        is_first = live.state is State.WAITING
        was_held = live.state is State.HELD
        if was_held:
            self.running.remove(live)
            self.peak.remove(live)
        if live.state in WITHOUT_KV:
            live.num_published = len(live.block_table)
        live.block_table.extend(self.device.take(num_blocks))
        if live.state is State.ON_HOST:
            self._copy_in(live, draft)
        if is_first:
            live.cached_tokens = live.computed
            live.account.num_started += 1
            self.queues[live.rank].park(live.account)
            if live.first_start_us is None:
                live.first_start_us = draft.now_us
        else:
            self.num_suspended[live.rank] -= 1
            self.outbox.resumed.append(live.request_id)
        self.accountant.note_start(live.account)
        live.state = State.DECODE if live.rest == 1 and live.computed else State.PREFILL
        if live.state is State.DECODE:
            live.debtor = None
        live.started_step = draft.step
        live.computed_at_start = max(live.computed, live.computed_high)
        live.bypasses = 0
        live.blocked_since_us = None
        self.estimate_total(live)
        self.set_next_check(live)
        self.running.add(live)
        self.peak.add(live)
        self.journal.started(live, is_first=is_first)

    def _copy_in(self, live: LiveRequest, draft: Draft) -> None:
        for device_block, host_block in zip(live.block_table, live.host_blocks, strict=False):
            draft.swap_in.append(BlockCopy(live.request_id, device_block, host_block))
        draft.host_blocks_after.extend(live.host_blocks)
        payer = live.account if live.debtor is None else live.debtor
        live.debtor = None
        draft.copy_charges.append(CopyCharge(payer, self.cost.copy_ns(len(live.host_blocks))))
        live.swapped_blocks += len(live.host_blocks)
        live.host_blocks = []
        live.num_published = len(live.prefix_keys)  # what the cache knows is elsewhere

    def suspend(
        self, live: LiveRequest, lever: Lever, resource: Resource, by: LiveRequest | None, draft: Draft
    ) -> None:
        """Out of its slot (or from held further out), by a lever; back into the queue with its old key."""
        costs = self.journal.lever_costs(live, lever)
        was_running = live.state in IN_SLOT
        self.running.remove(live)
        self.accountant.note_end(live.account)
        live.suspended_step = draft.step
        live.num_preemptions += 1
        if was_running:
            self.num_suspended[live.rank] += 1
        else:
            self.queues[live.rank].remove(live)
        if by is not None and by.rank < live.rank and lever is not Lever.HOLD:
            live.debtor = by.account
        match lever:
            case Lever.HOLD:
                live.state = State.HELD
                live.num_holds += 1
                self.running.add(live)
            case Lever.SWAP:
                self.peak.remove(live)
                live.num_swaps += 1
                self._copy_out(live, by, draft)
            case Lever.RECOMPUTE:
                self.peak.remove(live)
                live.num_recomputes += 1
                self._drop(live)
        by_class = None if by is None else by.request.priority_class
        self.tally.preemptions[live.request.priority_class, by_class, resource, lever] += 1
        if by is not None and by.rank < live.rank and lever is not Lever.HOLD:
            self.headroom.note_pressure(live.rank, draft.now_us)
        self.outbox.preempted.append(Preempted(live.request_id, lever, resource, None if by is None else by.request_id))
        self.journal.preempted(live, lever, resource, by, costs)
        if live.state is not State.SAVING:
            self.enqueue(live)

    def _copy_out(self, live: LiveRequest, by: LiveRequest | None, draft: Draft) -> None:
        """Needs host blocks for what is computed and not saved yet; blocks without KV are free at once."""
        self.checkpoints.close(live)
        num_full, num_clean = self.config.num_blocks_for(live.computed), len(live.host_blocks)
        while self.host.num_free < num_full - num_clean:
            self.drop_checkpoint(self.checkpoints.last())
        live.host_blocks.extend(self.host.take(num_full - num_clean))
        copied = live.block_table[:num_full]
        for device_block, host_block in zip(copied[num_clean:], live.host_blocks[num_clean:], strict=True):
            draft.swap_out.append(BlockCopy(live.request_id, device_block, host_block))
        draft.lowest_swapped_rank = max(draft.lowest_swapped_rank, live.rank)
        payer = live.account if live.debtor is None else live.debtor
        draft.copy_charges.append(CopyCharge(payer, self.cost.copy_ns(num_full - num_clean)))
        live.swapped_blocks += num_full - num_clean
        if self.config.copies_in_order:
            self.device.give(live.block_table)
            live.state = State.ON_HOST
        else:
            self.device.give(live.block_table[num_full:])
            self.device.fence(live.request_id, copied)
            self.fences[live.request_id] = None if by is None else by.request_id
            live.state = State.SAVING
        live.block_table = []

    @property
    def host_room(self) -> int:
        """Host blocks for who has to go: what is saved ahead makes room for them."""
        return self.host.num_free + self.checkpoints.num_blocks

    def save_ahead(self, live: LiveRequest, count: int, draft: Draft) -> None:
        """The next ``count`` of its full blocks go to the host and stay on the device; its tenant pays."""
        num_clean = len(live.host_blocks)
        fresh = self.host.take(count)
        for device_block, host_block in zip(live.block_table[num_clean : num_clean + count], fresh, strict=True):
            draft.swap_out.append(BlockCopy(live.request_id, device_block, host_block))
        live.host_blocks.extend(fresh)
        self.checkpoints.note(live, count)
        draft.copy_charges.append(CopyCharge(live.account, self.cost.copy_ns(count)))

    def drop_checkpoint(self, live: LiveRequest) -> None:
        """What was saved of one that runs is given up."""
        self.checkpoints.close(live)
        self.host.give(live.host_blocks)
        live.host_blocks = []

    def _drop(self, live: LiveRequest) -> None:
        self.drop_checkpoint(live)
        self.device.give(live.block_table)
        live.block_table = []
        live.computed_high = max(live.computed_high, live.computed)
        live.computed = 0
        live.state = State.DROPPED

    def complete_copy(self, request_id: RequestId) -> None:
        """The copy out of a request has completed: its device blocks are free, and it may come back."""
        del self.fences[request_id]
        self.device.lift_fence(request_id)
        if self.host.is_fenced(request_id):  # it ended while its copy ran
            self.host.lift_fence(request_id)
            return
        live = self.lives[request_id]
        live.state = State.ON_HOST
        self.journal.saved(live)
        self.enqueue(live)

    def fail_row(self, live: LiveRequest, draft: Draft) -> None:
        """The executor could not compute it: its KV is worth nothing, it goes back to waiting by recompute."""
        live.failures += 1
        self.device.forget(live.block_table)
        self.suspend(live, Lever.RECOMPUTE, Resource.FAILURE, None, draft)

    def finish(self, live: LiveRequest, reason: FinishReason, now_us: int, detail: str = "") -> None:
        """The end, from any state: everything it holds goes back, one Finished goes out."""
        self._release(live)
        if live.output_ids and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.lengths[live.rank].observe(len(live.output_ids))
        self.journal.ended_as(live, reason)
        gpu_us = self.accountant.report(live.tab.charged)
        self.outbox.finished.append(live.finished(reason, now_us, gpu_us, detail))

    def reject(self, live: LiveRequest, reason: RejectReason, retry_after_us: int | None, now_us: int) -> None:
        """The end of one that never ran: uncharged, with a hint when to come back."""
        is_held_back = live.account.at_concurrency
        self._release(live)
        self.note_refusal(live, reason, retry_after_us, now_us, of_capacity=not is_held_back)
        self.journal.ended_as(live, reason)
        self.outbox.rejected.append(Rejected(live.request_id, reason, retry_after_us, live.waits.told()))

    def note_refusal(
        self,
        live: LiveRequest,
        reason: RejectReason,
        retry_after_us: int | None,
        now_us: int,
        *,
        of_capacity: bool = True,
    ) -> None:
        """For the ladder, and for the promise it may have been given. ``of_capacity``: no limit of its own did it."""
        of_capacity = of_capacity and retry_after_us is not None and reason is not RejectReason.DRAINING
        self.overload.note_shed(live.rank, reason, now_us, of_capacity=of_capacity)
        if live.is_promised and of_capacity:
            self.returns[live.rank].note(is_kept=False)

    def _release(self, live: LiveRequest) -> None:
        del self.lives[live.request_id]
        self.num_lives[live.rank] -= 1
        if live.state in ON_DEVICE:
            self.accountant.note_end(live.account)
            self.checkpoints.close(live)
            self.running.remove(live)
            self.peak.remove(live)
            self.device.give(live.block_table)
            live.block_table = []
        if live.state in IN_LINE:
            self.queues[live.rank].remove(live)
        if live.state in SUSPENDED:
            self.num_suspended[live.rank] -= 1
        if live.state is State.SAVING:
            self.host.fence(live.request_id, live.host_blocks)
        elif live.host_blocks:
            self.host.give(live.host_blocks)
        if live.state is not State.WAITING:
            live.account.num_started -= 1
            come_back(self, live.account)
        live.host_blocks = []
        self.accountant.leave(live.account)
