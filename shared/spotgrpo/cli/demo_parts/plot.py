"""The picture of a run: reward of every version, and held-out accuracy before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GREEN: Final = "#2a9d8f"
ORANGE: Final = "#e76f51"
GREY: Final = "#6c757d"
SMOOTHING: Final = 0.35
"""Weight of the newest value in the running mean."""


@dataclass(frozen=True)
class PlotData:
    """``rewards[i]`` is the mean sampled reward of ``versions[i]``; ``killed_at`` the version of the kill."""

    title: str
    versions: Sequence[int]
    rewards: Sequence[float]
    accuracy_before: float
    accuracy_after: float
    killed_at: int | None = None


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential running mean that starts at the first value."""
    means: list[float] = []
    for value in values:
        last = means[-1] if means else value
        means.append(last + SMOOTHING * (value - last))
    return means


def draw(data: PlotData, path: Path) -> None:
    """Write ``data`` to ``path`` as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=140, layout="constrained")
    _draw_reward(axes, data)
    _draw_accuracy(axes, data)
    _draw_kill(axes, data)
    _dress(axes, data)
    figure.savefig(path)
    plt.close(figure)


def _draw_reward(axes: Any, data: PlotData) -> None:
    axes.plot(data.versions, data.rewards, "o", color=GREEN, alpha=0.35, markersize=5)
    label = "reward of sampled completions (running mean)"
    axes.plot(data.versions, running_mean(data.rewards), color=GREEN, linewidth=2.5, label=label)


def _draw_accuracy(axes: Any, data: PlotData) -> None:
    last = max(data.versions, default=0)
    ends = ([0, last], [data.accuracy_before, data.accuracy_after])
    axes.plot(*ends, "--", color=ORANGE, linewidth=1, alpha=0.7)
    axes.plot(*ends, "D", color=ORANGE, markersize=9, label="held-out accuracy (greedy)", zorder=5)
    for x, y in zip(*ends, strict=True):
        axes.annotate(
            f"{y:.0%}",
            (x, y),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            color=ORANGE,
        )


def _draw_kill(axes: Any, data: PlotData) -> None:
    if data.killed_at is not None:
        axes.axvline(data.killed_at, color=GREY, linestyle=":", linewidth=1.5)
        axes.annotate(
            "a worker is killed",
            (data.killed_at, 1.03),
            xytext=(5, 0),
            textcoords="offset points",
            color=GREY,
        )


def _dress(axes: Any, data: PlotData) -> None:
    axes.set_title(data.title, loc="left", fontweight="bold")
    axes.set_xlabel("policy version (optimizer steps)")
    axes.set_ylim(0, 1.08)
    axes.grid(axis="y", color="#e9ecef")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
