"""Traces as arrivals: columns, classes, speed and limits, and files that are none."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from gpu_worker import simulate
from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.traces import TraceError, TraceFile, read_traces, story_of
from scheduler_engine.policy import PriorityClass

TOY = DEVICES["toy"]


def written(tmp_path: Path, text: str, name: str = "day.csv.gz") -> Path:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_trace_gives_times_tenants_and_lengths(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,tenant,input_tokens,output_tokens\n0.5,c1,30,4\n2.25,c2,7,1\n")
    trace = read_traces([TraceFile(path)], TOY)
    found = [
        (each.at_us, each.submit.tenant_id, len(each.submit.prompt_token_ids), each.submit.max_tokens)
        for each in trace.arrivals
    ]
    assert found == [(500_000, "c1", 30, 4), (2_250_000, "c2", 7, 1)]
    assert {each.submit.priority_class for each in trace.arrivals} == {PriorityClass.INTERACTIVE}
    assert trace.num_cut == 0


def test_a_file_without_times_is_a_batch_job_of_a_tenant_of_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, "input_tokens,output_tokens\n30,4\n7,0\n", "papers.csv")
    arrivals = read_traces([TraceFile.parse(str(path))], TOY).arrivals
    assert {(each.at_us, each.submit.tenant_id, each.submit.priority_class) for each in arrivals} == {
        (0, "papers", PriorityClass.BATCH)
    }
    assert [each.submit.max_tokens for each in arrivals] == [4, 1]


def test_traces_are_laid_over_each_other_faster_and_shorter_as_told(tmp_path: Path) -> None:
    chats = written(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1,1\n4,1,1\n8,1,1\n", "chats.csv")
    tools = TraceFile.parse(f"default={written(tmp_path, chats.read_text().replace('4,', '3,'), 'tools.csv')}")
    arrivals = read_traces([TraceFile(chats), tools], TOY, speed=2.0, limit=2).arrivals
    assert [(each.at_us, each.submit.tenant_id) for each in arrivals] == [
        (0, "chats"),
        (0, "tools"),
        (1_500_000, "tools"),
        (2_000_000, "chats"),
    ]
    assert arrivals[1].submit.priority_class is PriorityClass.DEFAULT


def test_a_request_beyond_the_context_is_cut_at_its_prompt_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "input_tokens,output_tokens\n9000,48\n10,9000\n10,10\n")
    trace = read_traces([TraceFile(path)], TOY)
    lengths = [(len(each.submit.prompt_token_ids), each.submit.max_tokens) for each in trace.arrivals]
    assert lengths == [(2_000, 48), (1, 2_047), (10, 10)]
    assert trace.num_cut == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column input_tokens"),
        ("model,rps\nm,3\n", "no column input_tokens"),
        ("input_tokens,output_tokens\n", "no requests"),
        ("input_tokens,output_tokens\n3,many\n", "line 2: lengths must be integers"),
        ("input_tokens,output_tokens\n3\n", "line 2: lengths must be integers"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\nsoon,3,4\n", "line 3: lengths must be integers"),
        ("arrival_s,input_tokens,output_tokens\nnan,3,4\n", "line 2: lengths and arrival_s"),
        ("input_tokens,output_tokens\n-3,4\n", "line 2: lengths and arrival_s"),
    ],
)
def test_a_file_that_is_no_request_trace_is_refused_by_name_and_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        read_traces([TraceFile(written(tmp_path, text))], TOY)
    assert "day" in str(caught.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"\x1f\x8b\x08\x00 no gzip")])
def test_a_trace_that_cannot_be_read_is_one_sentence_and_status_2(
    tmp_path: Path, make: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lost.csv.gz"
    assert callable(make)
    make(path)
    assert simulate.main(["--trace", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "lost.csv.gz" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "urgent=a.csv"], "interactive, default or batch"),
        (["--trace", "a.csv", "--story", "flood"], "not allowed with"),
        (["--speed", "0"], "greater than 0"),
        (["--speed", "nan"], "greater than 0"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_a_wrong_trace_argument_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate.main(arguments)
    assert words in capsys.readouterr().err


def test_the_traces_of_the_tree_are_what_their_sums_say_and_can_be_run(project_root: Path) -> None:
    folder = project_root / "traces"
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert {path.name for path in folder.glob("*.csv.gz")} == set(sums)
    device = DEVICES["h200-8b"]
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
        trace = read_traces([TraceFile(folder / name)], device, limit=5)
        outcome = Simulation(device, trace.arrivals).run()
        assert outcome.clients.all().completed == 5


def test_loud_is_the_tenant_that_sends_half_of_its_class(tmp_path: Path, project_root: Path) -> None:
    servegen = TraceFile(project_root / "traces" / "servegen_mlarge_1h.csv.gz")
    assert story_of(read_traces([servegen], TOY, limit=2_000)).loud_tenant == "c104"
    one = written(tmp_path, "input_tokens,output_tokens\n3,4\n")
    assert story_of(read_traces([TraceFile(one)], TOY)).loud_tenant is None
