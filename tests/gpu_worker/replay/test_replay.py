"""A recorded log decides the same again, in every step; where it does not, the step and both decisions are named."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpu_worker.replay import checkpoint, prefix_names, record_log, recording
from gpu_worker.replay.log_writer import LogWriter
from gpu_worker.replay.prefix_names import PrefixNames, names_of, runs_of
from gpu_worker.replay.record_log import (
    Boot,
    Closed,
    Entry,
    LogError,
    LogFile,
    ServedElsewhere,
    Stepped,
    Submitted,
    log_files,
)
from gpu_worker.replay.recording import Origin, RecordingScheduler
from gpu_worker.replay.rerun import Diverged, Listener, entries_of, replay
from scheduler_engine.events import StepEvents
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass
from scheduler_engine.record import pack, unpack_all
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.replay.random_run import CONFIG, COST, POLICY, RandomRun

ORIGIN = Origin(worker_id="worker-1", epoch=3, model="toy")


class Wall:
    """A clock on the wall that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def recorded(
    folder: Path,
    seed: int,
    num_steps: int,
    *,
    wall: Wall | None = None,
    limit_bytes: int = 1 << 24,
    most_file_bytes: int = 1 << 22,
) -> tuple[str, int]:
    """Record a random run; its digest and number of steps. With ``wall`` two minutes pass every 400 steps."""
    has_files, wall = wall is not None, wall or Wall()
    writer = LogWriter(folder, limit_bytes, wall)
    engine = RecordingScheduler(
        CONFIG, POLICY, COST, origin=ORIGIN, writer=writer, most_file_bytes=most_file_bytes, unix_s=wall
    )
    run = RandomRun(engine, seed)

    def next_file(step: int) -> None:
        if step % 400 == 399:
            wall.now_s += 120 if has_files else 0
            writer.catch_up()

    run.run(num_steps // 2, next_file)
    engine.set_policy(replace(POLICY, version=2, classes=tuple(replace(c, chunk_max=96) for c in POLICY.classes)))  # type: ignore[arg-type]
    run.run(num_steps - num_steps // 2, next_file)
    engine.close()
    writer.close()
    assert not writer.has_failed
    return engine.digest, num_steps


def rewrite(path: Path, entries: list[Entry]) -> Path:
    with path.open("wb") as file:
        record_log.begin(file)
        file.write(record_log.frame(entries))
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    recorded(folder, 1, 2_000)
    return next(folder.iterdir())


def test_a_recorded_run_has_the_same_digest_as_the_run_without_recording(tmp_path: Path) -> None:
    digest, _ = recorded(tmp_path, 5, 600)
    engine = Scheduler(CONFIG, POLICY, COST)
    run = RandomRun(engine, 5)
    run.run(300)
    engine.set_policy(replace(POLICY, version=2, classes=tuple(replace(c, chunk_max=96) for c in POLICY.classes)))  # type: ignore[arg-type]
    run.run(300)
    assert engine.digest == digest


def test_a_log_replays_to_the_same_digest(tmp_path: Path) -> None:  # S164
    digest, num_steps = recorded(tmp_path, 2, 3_000)
    told: list[tuple[int, int]] = []
    found = replay(log_files(tmp_path), progress=lambda done, total: told.append((done, total)))
    assert (found.digest, found.num_steps, found.is_cut) == (digest, num_steps, False)
    assert told[-1][0] == told[-1][1]


def test_no_token_id_is_in_a_log_and_lengths_are(log: Path) -> None:
    entries = list(entries_of([LogFile(log)]))
    submits = [entry for entry in entries if isinstance(entry, Submitted)]
    assert all("stop_token_ids" not in entry.fields for entry in submits)
    assert 1 < max(len(entry.prefix_runs) for entry in submits) < 6
    assert max(entry.num_prompt_tokens for entry in submits) > 300


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_decision_is_caught_at_its_step_with_both_records(log: Path, tmp_path: Path, seed: int) -> None:
    entries = list(entries_of([LogFile(log)]))
    steps = [index for index, entry in enumerate(entries) if isinstance(entry, Stepped) and entry.records]
    index = steps[len(steps) * (seed + 1) // 4]
    entry = entries[index]
    assert isinstance(entry, Stepped)
    first, *others = unpack_all(entry.records)
    changed = first._replace(sequence=first.sequence + 1)
    records = b"".join(pack(*record) for record in (changed, *others))
    entries[index] = msgspec.structs.replace(entry, records=records)
    with pytest.raises(Diverged) as caught:
        replay([LogFile(rewrite(tmp_path / "flipped.rlog", entries))])
    assert caught.value.difference.step == first.step
    assert (caught.value.difference.recorded, caught.value.difference.found) == (changed, first)
    assert f"step {first.step}" in str(caught.value)


def test_a_step_time_that_is_another_is_caught(log: Path, tmp_path: Path) -> None:
    entries = list(entries_of([LogFile(log)]))
    index = next(i for i, entry in enumerate(entries) if isinstance(entry, Stepped) and entry.duration_us and i > 200)
    entry = entries[index]
    assert isinstance(entry, Stepped)
    entries[index] = msgspec.structs.replace(entry, duration_us=entry.duration_us + 1)
    step = sum(isinstance(entry, Stepped) for entry in entries[:index])
    with pytest.raises(Diverged, match=f"step {step}: "):
        replay([LogFile(rewrite(tmp_path / "flipped.rlog", entries))])


def test_an_engine_with_another_rule_diverges_from_the_log(log: Path, tmp_path: Path) -> None:
    entries = list(entries_of([LogFile(log)]))
    boot = entries[0]
    assert isinstance(boot, Boot)
    policy = {**boot.policy, "classes": {**boot.policy["classes"]}}
    policy["classes"]["default"] = {**policy["classes"]["default"], "chunk_max": 64}
    entries[0] = msgspec.structs.replace(boot, policy=policy)
    with pytest.raises(Diverged):
        replay([LogFile(rewrite(tmp_path / "other.rlog", entries))])


class Hits(Listener):
    """Prompt tokens that were found in the cache."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def applied(self, plan: StepPlan, events: StepEvents, entry: Stepped, engine: Scheduler) -> None:
        self.num_tokens += sum(finished.cached_tokens for finished in events.finished)


def test_prompts_that_begin_alike_find_each_other_again_without_a_token_of_them(log: Path) -> None:
    hits = Hits()
    replay([LogFile(log)], hits)
    assert hits.num_tokens > 100


def test_names_of_prefixes_are_forgotten_only_with_the_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_names, "_LEAST_TO_PRUNE", 100)
    digest, _ = recorded(tmp_path, 8, 2_000, wall=Wall())
    hits = Hits()
    assert replay(log_files(tmp_path), hits).digest == digest
    assert hits.num_tokens > 100


def test_runs_name_what_they_were_made_of() -> None:
    names = PrefixNames()
    first, second = names.of([b"a", b"b", b"c"]), names.of([b"a", b"b", b"x", b"y"])
    assert (runs_of(first), runs_of(second)) == (((0, 3),), ((0, 2), (3, 2)))
    assert names_of(runs_of(second)) == second
    names.prune(second)
    assert names.of([b"b", b"c"]) == [second[1], (5).to_bytes(6, "big")]
    assert (runs_of([]), names_of(())) == ((), [])


# files


def test_every_two_minutes_have_a_file_that_replays_alone_and_as_part_of_all(tmp_path: Path) -> None:
    digest, num_steps = recorded(tmp_path, 3, 2_000, wall=Wall())
    files = log_files(tmp_path)
    assert len(files) == 5
    assert replay(files).digest == digest
    ends = []
    for file in files:
        boot, found = file.boot(), replay([file])
        ends.append((boot.digest, found.digest))
        assert boot.checkpoint is None or b"\x01\x02\x03" not in boot.checkpoint
    assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert replay(files[-2:]).num_steps == num_steps


def test_while_many_requests_are_live_a_file_lasts_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FEW_LIVE", -1)
    recorded(tmp_path, 3, 2_000, wall=Wall())
    assert len(log_files(tmp_path)) == 1


def test_of_a_folder_hardly_more_than_the_last_minutes_are_taken(tmp_path: Path) -> None:
    digest, _ = recorded(tmp_path, 3, 2_000, wall=Wall())
    all_files = [file.path for file in log_files(tmp_path)]
    for minutes, num_files in ((1, 2), (2, 2), (3, 3), (8, 5), (60, 5)):
        files = log_files(tmp_path, minutes)
        assert [file.path for file in files] == all_files[-num_files:]
        assert replay(files).digest == digest


def test_the_folder_stays_within_its_bound_and_the_newest_files_replay(tmp_path: Path) -> None:
    limit_bytes = 150_000
    digest, _ = recorded(tmp_path, 4, 4_000, limit_bytes=limit_bytes, most_file_bytes=4_000)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 2
    assert sum(sizes) <= limit_bytes
    assert replay(log_files(tmp_path)).digest == digest


def test_a_log_cut_in_the_middle_of_a_frame_replays_up_to_it(log: Path, tmp_path: Path) -> None:
    body = log.read_bytes()
    cut = tmp_path / "cut.rlog"
    cut.write_bytes(body[: len(body) * 2 // 3])
    found = replay([LogFile(cut)])
    assert found.is_cut
    assert 0 < found.num_steps < 2_000


def test_a_damaged_log_names_the_byte(log: Path, tmp_path: Path) -> None:
    body = bytearray(log.read_bytes())
    body[200] ^= 0xFF
    damaged = tmp_path / "damaged.rlog"
    damaged.write_bytes(body)
    with pytest.raises(LogError, match=r"damaged\.rlog is damaged at byte 21: the checksum"):
        replay([LogFile(damaged)])


def test_a_foreign_file_a_newer_format_and_an_empty_folder_are_told_apart(log: Path, tmp_path: Path) -> None:
    foreign, newer = tmp_path / "foreign.txt", tmp_path / "newer.txt"
    foreign.write_bytes(b"PK\x03\x04 something else")
    newer.write_bytes(record_log.MAGIC + bytes([record_log.FORMAT + 1]))
    with pytest.raises(LogError, match="is not a recorded log"):
        LogFile(foreign)
    with pytest.raises(LogError, match="has format 2, and this program reads format 1"):
        LogFile(newer)
    with pytest.raises(LogError, match="holds no recorded log"):
        log_files(tmp_path)
    with pytest.raises(LogError, match="No such file"):
        LogFile(tmp_path / "absent.rlog")


def test_state_of_another_engine_is_not_taken_up(tmp_path: Path) -> None:
    recorded(tmp_path, 3, 900, wall=Wall())
    entries = list(entries_of([log_files(tmp_path)[1]]))
    boot = entries[0]
    assert isinstance(boot, Boot)
    path = rewrite(tmp_path / "other.rlog", [msgspec.structs.replace(boot, engine="0123"), *entries[1:]])
    with pytest.raises(LogError, match="only the same source can take its state up"):
        replay([LogFile(path)])


def test_a_checkpoint_makes_nothing_but_an_engine() -> None:
    import pickle

    for evil in (pickle.dumps(Path), pickle.dumps(time.sleep), pickle.dumps([1]), b"no pickle", b""):
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.load(evil)


def test_an_engine_goes_on_from_its_checkpoint_as_if_nothing_had_been() -> None:
    engine = Scheduler(CONFIG, PolicySnapshot(version=1, classes=POLICY.classes), COST)
    run = RandomRun(engine, 11, with_stops=False)
    run.run(700)
    run.engine = checkpoint.load(checkpoint.save(engine))
    run.run(300)
    run.engine.check_books()
    undisturbed = Scheduler(CONFIG, POLICY, COST)
    RandomRun(undisturbed, 11, with_stops=False).run(1_000)
    assert run.engine.digest == undisturbed.digest


def test_a_disk_that_fails_ends_the_recording_and_not_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    writer = LogWriter(in_the_way, 1 << 20)
    engine = RecordingScheduler(CONFIG, POLICY, COST, origin=ORIGIN, writer=writer, most_file_bytes=1 << 18)
    RandomRun(engine, 1).run(50)
    engine.close()
    writer.close()
    assert writer.has_failed
    assert "recording to" in capsys.readouterr().err


def test_answers_one_at_a_time_share_a_frame_a_second_of_the_log_and_one_that_stays_idle_writes_the_last() -> None:
    """Each makes the engine idle; a frame for each would take the time of the thread that sends the next answer."""

    class Frames(LogWriter):
        def __init__(self) -> None:
            self.num_entry_bytes, self.submits = 0, list[int]()

        def put(self, work: record_log.Boot | list[Entry]) -> None:
            if isinstance(work, list):
                self.submits.append(sum(isinstance(entry, Submitted) for entry in work))

    writer, now_us = Frames(), 1_000_000
    engine = RecordingScheduler(CONFIG, POLICY, COST, origin=ORIGIN, writer=writer, most_file_bytes=1 << 20)
    for number in range(50):
        request = Request(
            request_id=RequestId(f"r{number}"),
            tenant_id="Aurora",
            priority_class=PriorityClass.DEFAULT,
            prompt_token_ids=(1, 2),
            max_tokens=1,
        )
        engine.submit(request, now_us)
        for sampled in ([9], []):  # a step, and an empty one
            plan = engine.plan_step(now_us)
            assert plan.num_rows == len(sampled)
            engine.apply_step(StepResult(plan.step, 10 * len(sampled), sampled), now_us)
        now_us += 30_000
    assert writer.submits == [1, 34]  # the first had nothing before it
    engine.apply_step(StepResult(engine.plan_step(now_us).step, 0), now_us)
    assert writer.submits == [1, 34, 15]


def test_the_last_entry_of_a_log_says_that_it_is_whole(log: Path) -> None:
    last = list(entries_of([LogFile(log)]))[-1]
    assert isinstance(last, Closed)
    assert last.is_end


def test_what_other_workers_served_is_in_the_log_and_without_it_decisions_are_others(log: Path, tmp_path: Path) -> None:
    entries = list(entries_of([LogFile(log)]))
    told = [entry for entry in entries if isinstance(entry, ServedElsewhere)]
    assert told
    without = rewrite(tmp_path / "without.rlog", [entry for entry in entries if entry not in told])
    with pytest.raises(Diverged):
        replay([LogFile(without)])


@pytest.mark.soak
def test_a_million_random_steps_replay_to_the_same_digest(tmp_path: Path) -> None:
    digest, num_steps = recorded(tmp_path, 7, 1_000_000, limit_bytes=1 << 30, most_file_bytes=1 << 22)
    found = replay(log_files(tmp_path))
    assert (found.digest, found.num_steps) == (digest, num_steps)


def test_whatever_an_engine_can_be_told_is_recorded() -> None:
    looking_in = {
        "charges_us",
        "check_books",
        "check_totals",
        "explain",
        "load",
        "prefix_keys_in_use",
        "tenants",
        "waiting_services",
    }
    told = {name for name, value in vars(Scheduler).items() if callable(value) and not name.startswith("_")}
    assert told - looking_in == set(vars(RecordingScheduler)) & told
