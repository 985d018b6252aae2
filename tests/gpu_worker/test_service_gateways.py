"""A gateway that is gone, or does not read: its responses are settled, and the others go on."""

from __future__ import annotations

from typing import Any

from gpu_worker.serving.listener import GATEWAY_CHECK_INTERVAL_US
from gpu_worker.serving.service import GATEWAY_GRACE_US
from tests.gpu_worker.service_stage import Stage
from wire.memory_bus import GATEWAY_LIFETIME_US


def test_a_gateway_that_is_gone_loses_its_responses_and_they_are_settled_within_15_seconds(small_worker: Any) -> None:
    """The longest wait: killed right behind a heartbeat, missed at the next look, and given up at a look too."""
    assert GATEWAY_LIFETIME_US + GATEWAY_CHECK_INTERVAL_US + GATEWAY_GRACE_US + GATEWAY_CHECK_INTERVAL_US < 15_000_000
    stage = Stage(small_worker, scale=0.5)
    stage.start()
    stage.send(small_worker.submit(max_tokens=1_900))
    stage.until(lambda: len(stage.indexes("r1")) > 2)
    for jump_us in (GATEWAY_LIFETIME_US, GATEWAY_CHECK_INTERVAL_US):
        num_checks = stage.bus.num_gateway_checks + 1
        stage.clock.shift_us += jump_us
        stage.until_checked(num_checks)
    assert not stage.usages()
    stage.clock.shift_us += GATEWAY_GRACE_US
    stage.until_end("r1")
    stage.stop()
    (usage,) = stage.usages()
    assert usage.terminal == "failed_platform"
    assert 0 < usage.output_tokens < 1_900


def test_a_gateway_that_does_not_read_is_cut_off_and_the_others_go_on(small_worker: Any) -> None:
    stage = Stage(small_worker, max_stream_length=40)
    stage.start()
    stage.send(small_worker.submit("deaf", gateway_id="g2", max_tokens=1_900))
    stage.hub.gateways_seen_at_us["g2"] = stage.clock.now_us() + 10**12
    stage.until(lambda: bool(stage.usages()))
    stage.send(small_worker.submit("other", max_tokens=30))
    stage.until_end("other")
    stage.stop()
    assert stage.indexes("other") == list(range(30))
    assert [usage.terminal for usage in stage.usages()] == ["failed_platform", "completed"]
