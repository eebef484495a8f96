"""The end of a demo: what was reached, what it cost, where things are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from spotgrpo.cli.demo_parts.screen import clock

BOOKED: Final = ("issued", "trained", "flat", "stale", "dead", "duplicate")
"""Counts that the ledgers hold; ``groups_*`` in the summary."""


@dataclass(frozen=True)
class Summary:
    """``summary.json``; the fields are its keys. Times in seconds, accuracies between 0 and 1.

    ``train_wall_s`` runs from the first task to the last commit, ``wall_s`` over the whole demo.
    """

    run: str
    seed: int
    engine: str
    accuracy_before: float
    accuracy_after: float
    heldout_prompts: int
    versions: int
    groups_issued: int
    groups_trained: int
    groups_flat: int
    groups_stale: int
    groups_dead: int
    groups_duplicate: int
    groups_lost: int
    workers_killed: int
    killed_worker_inflight: int
    tokens_generated: int
    train_wall_s: float
    wall_s: float
    adapter_dir: str
    metrics: str
    plot: str
    bucket: str
    examples: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """JSON types, but for ``schema``, which the writer adds."""
        return asdict(self)


def show(summary: Summary, summary_path: Path, console: Console) -> None:
    """Print the verdict: panels on a terminal, plain lines elsewhere."""
    rows = [*_rows(summary), ("summary", str(summary_path))]
    if console.is_terminal:
        _show_panel(summary, rows, console)
    else:
        for line in [headline(summary), *(f"  {name:10} {value}" for name, value in rows)]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def headline(summary: Summary) -> str:
    """The one sentence that matters."""
    before, after = summary.accuracy_before, summary.accuracy_after
    return (
        f"held-out accuracy {before:.1%} → {after:.1%} ({after - before:+.1%}) "
        f"on {summary.heldout_prompts} prompts that training never saw"
    )


def _rows(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("groups", _groups(summary)),
        ("workers", _kills(summary)),
        ("time", _time(summary)),
        *(
            ("before", f"{_last_line(example)} {example['before']}")
            for example in summary.examples[:1]
        ),
        *(
            ("after", f"{_last_line(example)} {example['after']}")
            for example in summary.examples[:1]
        ),
        ("adapter", summary.adapter_dir),
        ("metrics", summary.metrics),
        ("plot", summary.plot),
    ]


def _groups(summary: Summary) -> str:
    counts = (
        f"{summary.groups_trained} trained, {summary.groups_flat} flat, {summary.groups_stale} stale, "
        f"{summary.groups_dead} dead, {summary.groups_duplicate} duplicate"
    )
    return f"{counts}, {summary.groups_lost} lost (from the ledgers in the bucket)"


def _kills(summary: Summary) -> str:
    if not summary.workers_killed:
        return "none was killed"
    return (
        f"{summary.workers_killed} killed with {summary.killed_worker_inflight} sequences in "
        "mid-generation; others did its tasks"
    )


def _time(summary: Summary) -> str:
    return (
        f"{summary.versions} versions in {clock(summary.train_wall_s)} of training, "
        f"{summary.tokens_generated:,} tokens by {summary.engine}; {clock(summary.wall_s)} in all"
    )


def _last_line(example: dict[str, str]) -> str:
    return example["prompt"].rsplit("\n", 1)[-1]


def _show_panel(summary: Summary, rows: list[tuple[str, str]], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    style = "green" if not summary.groups_lost else "red"
    console.print(f"\n[bold {style}]{headline(summary)}[/]\n", highlight=False)
    console.print(
        Panel(table, title=summary.run, border_style=style, padding=(1, 2)), highlight=False
    )
