"""What a run shows while it trains: a bar on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

_WINDOW = 50  # steps that the estimate of the remaining time looks back on


class Progress:
    """The display of one session. A context manager around the loop, so that an error leaves the terminal in order.

    On a terminal the bar shows the last step, and each that was validated stays as a line above it. Into a file or a
    pipe go lines: the first step, every ``every``-th, the last, and each that was validated.

    Args:
        total: steps of the whole run.
        done: steps done before this session.
        console: where to write; a terminal or not.
        every: ``log.every``.
        enabled: True on the first rank; the others show nothing.
    """

    def __init__(self, total: int, done: int, console: Console, every: int, enabled: bool) -> None:
        self._total, self._first, self._every = total, done + 1, every
        self._console, self._enabled = console, enabled
        self._times: deque[float] = deque(maxlen=_WINDOW + 1)
        self._bar: Bar | None = None
        if enabled and console.is_terminal:
            columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[facts]}", markup=False))
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("train", total=total, completed=done, facts="")

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Show what one step measured.

        Args:
            step: how many are done, this one included.
            record: ``loss``, ``lr``, ``grad_norm``, ``tokens_per_second``, and ``valid_loss`` if it was validated.
        """
        if not self._enabled:
            return
        self._times.append(time.monotonic())
        facts = (
            f"loss {record['loss']:.4f}  lr {record['lr']:.1e}  grad {record['grad_norm']:.2f}  "
            f"{record['tokens_per_second']:,.0f} tok/s  eta {self._remaining(step)}"
        )
        validated = "valid_loss" in record
        line = f"step {step}/{self._total}  {facts}"
        if validated:
            line += f"  valid {record['valid_loss']:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        wanted = step % self._every == 0 or step in (self._first, self._total)
        if validated or (wanted and self._bar is None):
            say(self._console, line)

    def _remaining(self, step: int) -> str:
        """From the pace of the last steps, without the first: warming up makes it slower than the others."""
        if len(self._times) < 2:
            return "-:--"
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        minutes, seconds = divmod(round(pace * (self._total - step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def say(console: Console, text: str) -> None:
    """Print ``text`` as it is: no colours, no markup, no wrapping."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
