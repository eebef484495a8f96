"""What a person sees while the demo runs: a live picture on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spotgrpo.cli.demo_parts.progress import Progress, WorkerState
from spotgrpo.shared.ports import QueueDepth

BARS: Final = "▁▂▃▄▅▆▇█"
SPARK_WIDTH: Final = 48
EVENTS_SHOWN: Final = 4
PLAIN_EVERY_S: Final = 5.0
STATE_STYLES: Final = {"killed": "red", "starting": "yellow", "draining": "yellow"}


@dataclass
class Picture:
    """Everything that is shown. Depths are None where they are not known."""

    title: str
    progress: Progress
    elapsed_s: float = 0.0
    tasks: QueueDepth | None = None
    rollouts: QueueDepth | None = None
    events: list[tuple[float, str]] = field(default_factory=list)


class Screen(Protocol):
    """Shows a picture again and again; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def update(self) -> None:
        """The picture changed, or time went on."""

    def say(self, text: str) -> None:
        """Something happened that a person wants to know."""


def make_screen(picture: Picture, console: Console) -> Screen:
    """The live screen on a terminal, plain lines elsewhere."""
    return LiveScreen(picture, console) if console.is_terminal else PlainScreen(picture, console)


class LiveScreen:
    """Redraws the picture in place."""

    def __init__(self, picture: Picture, console: Console) -> None:
        self._picture = picture
        self._live = Live(
            get_renderable=lambda: render(picture), console=console, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self) -> None:
        """The picture is drawn from its own thread."""

    def say(self, text: str) -> None:
        self._picture.events.append((self._picture.elapsed_s, text))


class PlainScreen:
    """Prints what happens, and a line of state every few seconds."""

    def __init__(self, picture: Picture, console: Console) -> None:
        self._picture = picture
        self._print: Callable[[str], None] = lambda text: console.print(
            text, markup=False, highlight=False, soft_wrap=True
        )
        self._due_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def update(self) -> None:
        if self._picture.elapsed_s >= self._due_s:
            self._print(plain_line(self._picture))
            self._due_s = self._picture.elapsed_s + PLAIN_EVERY_S

    def say(self, text: str) -> None:
        self._picture.events.append((self._picture.elapsed_s, text))
        self._print(f"{clock(self._picture.elapsed_s)}  {text}")


# ---- the live picture -------------------------------------------------------------------------------------


def render(picture: Picture) -> RenderableType:
    """The picture as a panel."""
    parts: list[RenderableType] = [_headline(picture), _numbers(picture), _workers(picture)]
    if picture.events:
        parts += [Text(), *(_event(*event) for event in picture.events[-EVENTS_SHOWN:])]
    return Panel(Group(*parts), title=picture.title, border_style="cyan", padding=(1, 2))


def _headline(picture: Picture) -> RenderableType:
    progress = picture.progress
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(width=SPARK_WIDTH)
    grid.add_column()
    done = f"[bold]version {progress.version}[/] of {progress.max_steps}"
    bar = ProgressBar(total=progress.max_steps, completed=progress.version, width=SPARK_WIDTH)
    grid.add_row(done, bar, f"{clock(picture.elapsed_s)}  {_left(progress)}")
    rewards = progress.rewards
    newest = f"[bold green]{rewards[-1]:.2f}[/]" if rewards else "[dim]no step yet[/]"
    grid.add_row("reward", Text(sparkline(rewards, SPARK_WIDTH), style="green"), newest)
    return grid


def _numbers(picture: Picture) -> RenderableType:
    return Text("  ·  ".join(numbers(picture)) + "\n", style="dim")


def _workers(picture: Picture) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker")
    table.add_column("state")
    for name in ("serves", "in flight", "groups", "tokens", "tokens/s"):
        table.add_column(name, justify="right")
    for worker in picture.progress.workers.values():
        style = STATE_STYLES.get(worker.state, "")
        cells = (str(worker.inflight), str(worker.groups), f"{worker.tokens:,}")
        speed = f"{worker.tokens_per_s:.0f}"
        table.add_row(worker.name, worker.state, worker.version, *cells, speed, style=style)
    return table


def _event(at_s: float, text: str) -> RenderableType:
    return Text.assemble((clock(at_s), "dim"), "  ", text)


# ---- shared by both ---------------------------------------------------------------------------------------


def plain_line(picture: Picture) -> str:
    """The picture as one line."""
    progress = picture.progress
    step = f"{clock(picture.elapsed_s)}  version {progress.version}/{progress.max_steps}"
    rewards = progress.rewards
    reward = f"reward {rewards[-1]:.2f}" if rewards else "reward -"
    workers = " ".join(_plain_worker(worker) for worker in progress.workers.values())
    return ", ".join([step, reward, *numbers(picture), _left(progress)]) + f" | {workers}"


def numbers(picture: Picture) -> list[str]:
    """Lag, queues and speed in words."""
    newest = picture.progress.newest
    lag = "lag -"
    if newest is not None and newest.lag_mean is not None:
        lag = f"lag {newest.lag_mean:.1f} (at most {newest.lag_max or 0:.0f})"
    queues = f"queues {_ready(picture.tasks)} tasks, {_ready(picture.rollouts)} groups"
    return [lag, queues, f"{picture.progress.tokens_per_s:.0f} tokens/s"]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values, between 0 and 1, as bars."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values[-width:])


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _plain_worker(worker: WorkerState) -> str:
    return f"[{worker.name} {worker.state} {worker.version or '-'} {worker.tokens:,} tokens]"


def _left(progress: Progress) -> str:
    left_s = progress.seconds_left()
    return f"about {clock(left_s)} left" if left_s is not None else "warming up"


def _ready(depth: QueueDepth | None) -> str:
    return "?" if depth is None else str(depth.ready)
