"""Fine-tuning runs from strict YAML recipes: ``python -m recipes``."""
