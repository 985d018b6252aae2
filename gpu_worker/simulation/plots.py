"""Pictures of a run, as PNG: times to the first token, who is in the batch, who has the device.

Needs matplotlib (the extra ``plot``), and imports it only when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gpu_worker.simulation.run import Outcome
from gpu_worker.simulation.series import bins_of, composition, cumulative, shares
from scheduler_engine.policy import PriorityClass

_COLOURS = {
    PriorityClass.INTERACTIVE: "#d1495b",
    PriorityClass.DEFAULT: "#edae49",
    PriorityClass.BATCH: "#3b7ea1",
}
_TENANT_COLOURS = ("#3b7ea1", "#d1495b", "#66a182", "#edae49", "#8d6a9f", "#2e4057", "#b0b0b0")
_INCHES = (7.5, 3.2)


class PlotError(Exception):
    """No picture can be drawn; the sentence says what is missing."""


def prepare(folder: Path) -> None:
    """To be called before a long run: makes the folder. Raises PlotError when nothing could be drawn into it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install -e '.[plot]', or pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(f"--plot {folder}: {error.strerror}") from None


def draw_all(outcome: Outcome, folder: Path, title: str) -> list[Path]:
    """``ttft.png``, ``composition.png`` and ``shares.png`` in ``folder``."""
    return [
        _ttft(outcome, folder / "ttft.png", title),
        _composition(outcome, folder / "composition.png", title),
        _shares(outcome, folder / "shares.png", title),
    ]


def _ttft(outcome: Outcome, path: Path, title: str) -> Path:
    figure, axes = _figure(1)
    for priority_class in PriorityClass:
        view = outcome.clients.of_class(priority_class)
        if view.ttft:
            label = f"{priority_class.label} ({view.ttft.total():,})"
            axes[0].plot(*cumulative(view.ttft), color=_COLOURS[priority_class], label=label)
    axes[0].set(xscale="log", xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1))
    return _saved(figure, axes, path, title)


def _composition(outcome: Outcome, path: Path, title: str) -> Path:
    bins = bins_of(max(outcome.timeline.seconds, default=0))
    figure, axes = _figure(2)
    for axis, rows in zip(axes, composition(outcome.timeline.seconds, bins), strict=True):
        present = [priority_class for priority_class in PriorityClass if any(rows[priority_class])]
        axis.stackplot(
            [each.start for each in bins],
            [rows[priority_class] for priority_class in present],
            colors=[_COLOURS[priority_class] for priority_class in present],
            labels=[priority_class.label for priority_class in present],
            linewidth=0,
        )
        axis.margins(x=0)
    axes[0].set(ylabel="decodes in a step")
    axes[1].set(ylabel="prefill tokens/s", xlabel="seconds")
    return _saved(figure, axes[:1], path, title)


def _shares(outcome: Outcome, path: Path, title: str) -> Path:
    bins = bins_of(max(outcome.charges, default=0))
    rows = shares(outcome.charges, bins)
    figure, axes = _figure(1)
    axes[0].stackplot(
        [each.start for each in bins], list(rows.values()), colors=_TENANT_COLOURS, labels=list(rows), linewidth=0
    )
    axes[0].margins(x=0)
    axes[0].set(ylabel="share of the device", xlabel="seconds", ylim=(0, 1.05))
    return _saved(figure, axes, path, title)


def _figure(num_rows: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    width, height = _INCHES
    figure = Figure(figsize=(width, height * (1 + 0.45 * (num_rows - 1))), layout="constrained")
    return figure, list(figure.subplots(num_rows, 1, sharex=num_rows > 1, squeeze=False)[:, 0])


def _saved(figure: Any, axes: list[Any], path: Path, title: str) -> Path:
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper right", fontsize=8, framealpha=0.8)
    axes[0].set_title(title, fontsize=9)
    figure.savefig(path, dpi=100)
    return path
