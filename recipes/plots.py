"""The loss curve as a picture, from ``metrics.jsonl``. matplotlib (the extra ``plot``) is imported late."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from .metrics import read_metrics

_LOG = logging.getLogger(__name__)


def plot_curve(metrics_path: Path, out_png: Path) -> Path | None:
    """Draw training and validation loss, and the unigram cross entropy of the validation set as the line to beat.

    Args:
        metrics_path: the run's ``metrics.jsonl``; a run that is still going on may be drawn.
        out_png: the picture; replaced at once when it is there.

    Returns:
        ``out_png``; None without matplotlib, after a warning that names the extra to install.

    Raises:
        ValueError: the file has no step with a finite loss.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        _LOG.warning("no picture of the loss: it needs matplotlib, pip install 'cp-zoo[plot]'")
        return None

    events = read_metrics(metrics_path)
    start: dict[str, Any] = next((event for event in events if event["kind"] == "start"), {})
    train = _points(events, "loss", ("step",))
    valid = _points(events, "valid_loss", ("step", "eval"))
    if not train:
        raise ValueError(f"{metrics_path}: no step with a finite loss in it; nothing to draw yet")
    unigram = start.get("unigram_cross_entropy")

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, so no display and no state is left behind
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="#3b6fb6", linewidth=1.5, marker="." if len(train) < 3 else "")
    _name(axes, train, "train", "#3b6fb6", above=not valid or train[-1][1] >= valid[-1][1])
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="#c8553d", linewidth=1, markersize=5)
        _name(axes, valid, "valid", "#c8553d", above=train[-1][1] < valid[-1][1])
    if unigram is not None:
        axes.axhline(unigram, color="#777777", linestyle="--", linewidth=1)
        falls = train[0][1] > unigram  # a curve that starts above the line leaves room below it, on the left
        axes.annotate(
            f"unigram entropy of valid {unigram:.2f}: the best without context", (0.01, unigram),
            xycoords=("axes fraction", "data"), xytext=(0, -5 if falls else 5), textcoords="offset points",
            va="top" if falls else "bottom", color="#777777", fontsize=9,
        )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per target)")
    axes.set_title(str(start.get("name", metrics_path.parent.name)), loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    temporary = out_png.with_name(f"{out_png.stem}.tmp{out_png.suffix}")
    figure.savefig(temporary)
    temporary.replace(out_png)
    return out_png


def _points(events: list[dict[str, Any]], key: str, kinds: tuple[str, ...]) -> list[tuple[int, float]]:
    found = ((event["step"], event[key]) for event in events if event["kind"] in kinds and key in event)
    return [(step, loss) for step, loss in found if loss is not None and math.isfinite(loss)]


def _name(axes: Any, points: list[tuple[int, float]], name: str, color: str, above: bool) -> None:
    """The curve's name and last value at its end; the two names stand on different sides of their curves."""
    axes.annotate(
        f"{name} {points[-1][1]:.2f}", points[-1], xytext=(6, 5 if above else -11), textcoords="offset points",
        color=color, fontsize=10, annotation_clip=False,
    )  # fmt: skip
