"""The picture of a run: reward of every version, held-out accuracy before and after, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GREEN: Final = "#2a9d8f"
ORANGE: Final = "#e76f51"
GREY: Final = "#6c757d"
BLUE: Final = "#2b6cb0"
PURPLE: Final = "#805ad5"
SMOOTHING: Final = 0.35
"""Weight of the newest value in the running mean."""


@dataclass(frozen=True)
class Flow:
    """How one step's groups came: their lag in versions, and what shares of the time either side waited."""

    version: int
    lag_mean: float | None
    lag_max: float | None
    learner_waited: float | None
    workers_idled: float | None


@dataclass(frozen=True)
class PlotData:
    """``rewards[i]`` is the mean sampled reward of ``versions[i]``; ``killed_at`` the version of the kill."""

    title: str
    versions: Sequence[int]
    rewards: Sequence[float]
    accuracy_before: float
    accuracy_after: float
    killed_at: int | None = None
    flow: Sequence[Flow] = ()


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

    figure, (axes, waits, lags) = plt.subplots(
        3,
        1,
        sharex=True,
        height_ratios=(5, 2, 1.5),
        figsize=(9, 7.5),
        dpi=140,
        layout="constrained",
    )
    _draw_reward(axes, data)
    _draw_accuracy(axes, data)
    _draw_kill(axes, data)
    _dress(axes, data)
    _draw_waits(waits, data.flow)
    _draw_lags(lags, data.flow)
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


def _draw_waits(axes: Any, flow: Sequence[Flow]) -> None:
    """Which side would have to be scaled."""
    lines = (
        ("learner waited for groups", BLUE, [(one.version, one.learner_waited) for one in flow]),
        (
            "workers idle: no tasks, or a blocked broker",
            PURPLE,
            [(one.version, one.workers_idled) for one in flow],
        ),
    )
    for label, colour, points in lines:
        known = [(version, share) for version, share in points if share is not None]
        means = running_mean([share for _, share in known])
        axes.plot([version for version, _ in known], means, color=colour, linewidth=2, label=label)
    axes.set_ylabel("share of time")
    axes.set_ylim(0, 1.05)
    _dress_plain(axes)
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _draw_lags(axes: Any, flow: Sequence[Flow]) -> None:
    versions = [one.version for one in flow if one.lag_max is not None]
    axes.bar(
        versions,
        [one.lag_max for one in flow if one.lag_max is not None],
        color="#ced4da",
        label="oldest group of a step",
    )
    known = [(one.version, one.lag_mean) for one in flow if one.lag_mean is not None]
    axes.plot(
        [version for version, _ in known],
        [lag for _, lag in known],
        color=GREY,
        linewidth=2,
        label="mean",
    )
    axes.set_ylabel("lag, in versions")
    axes.set_ylim(0, 1.5 + max((one.lag_max or 0.0 for one in flow), default=0.0))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("policy version (optimizer steps)")
    _dress_plain(axes)
    axes.legend(loc="upper right", frameon=False, ncols=2)


def _dress(axes: Any, data: PlotData) -> None:
    axes.set_title(data.title, loc="left", fontweight="bold")
    axes.set_ylim(0, 1.08)
    _dress_plain(axes)
    axes.legend(loc="lower right", frameon=False)


def _dress_plain(axes: Any) -> None:
    axes.grid(axis="y", color="#e9ecef")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
