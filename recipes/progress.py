"""What a run shows while it trains: a bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Use as a context manager around the loop.

    Args:
        total: steps of the whole run.
        done: steps done before this session.
        console: where to write.
        every: lines appear every so many steps.
        enabled: only the first rank shows anything.
    """

    def __init__(self, total: int, done: int, console: Console, every: int, enabled: bool) -> None:
        self._total, self._every, self._console, self._enabled = total, every, console, enabled
        self._bar: Bar | None = None
        if enabled and console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("train", total=total, completed=done, facts="")

    def update(self, step: int, record: dict[str, Any]) -> None:
        """Show what one step measured; validation results always get a line of their own."""
        if not self._enabled:
            return
        facts = f"loss {record['loss']:.4f}  grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}"
        facts += f"  {record['tokens_per_second']:.0f} tok/s"
        line = f"step {step}/{self._total}  {facts}"
        if "valid_loss" in record:
            line += f"  valid {record['valid_loss']:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
            if "valid_loss" in record:
                self._bar.console.print(line, highlight=False)
        elif step % self._every == 0 or step in (1, self._total) or "valid_loss" in record:
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
