"""``python -m recipes``."""

from .cli import app

app(prog_name="python -m recipes")
