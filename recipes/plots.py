"""The loss curve as a picture, from ``metrics.jsonl``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .metrics import read_metrics


def plot_curve(metrics: Path, picture: Path) -> Path | None:
    """Draw training and validation loss, with the unigram cross entropy as a line to beat.

    Args:
        metrics: the run's ``metrics.jsonl``.
        picture: a .png or .svg to write.

    Returns:
        ``picture``; None where matplotlib (the extra ``plot``) is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = read_metrics(metrics)
    steps = [event for event in events if event["kind"] == "step"]
    checks = [event for event in steps if "valid_loss" in event]
    start = next((event for event in events if event["kind"] == "start"), {})
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([e["step"] for e in steps], [float(e["loss"]) for e in steps], label="train", color="#3b6fb6", linewidth=1.4)
    if checks:
        points = [float(e["valid_loss"]) for e in checks]
        axes.plot([e["step"] for e in checks], points, "o-", label="valid", color="#c8553d", markersize=5)
    if "unigram_cross_entropy" in start:
        axes.axhline(start["unigram_cross_entropy"], label="unigram (valid)", color="#888888", linestyle="--", linewidth=1)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=start.get("name", metrics.parent.name))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    temporary = picture.with_name(f"{picture.stem}.tmp{picture.suffix}")
    figure.savefig(temporary)
    temporary.replace(picture)
    return picture
