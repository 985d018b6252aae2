"""``python -m gpu_worker.simulate`` with flags that cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.simulate import main


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--noise-percent=150"], "--noise-percent: must be a whole number from 0 to 100"),
        (["--seeds=3"], "--seeds does nothing without --compare"),
        (["--limit=3"], "--limit does nothing without --trace"),
        (["--speed=3"], "--speed does nothing without --trace"),
        (["--compare", "--plot=there"], "--plot does nothing beside --compare"),
        (["--compare", "--alone=batch"], "--alone does nothing beside --compare"),
        (["--record=/proc/nowhere"], "--record: /proc/nowhere: "),
    ],
)
def test_a_flag_that_cannot_be_meant_is_named(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device=toy", *flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe{}"], ids=["deep", "binary"])
def test_a_policy_that_is_no_json_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(text)
    assert main(["--device=toy", f"--policy={path}"]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told.startswith(f"--policy {path}: is ")
