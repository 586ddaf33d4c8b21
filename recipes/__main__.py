"""``python -m recipes``."""

from .cli import app

if __name__ == "__main__":  # a spawned worker imports this file again
    app(prog_name="python -m recipes")
