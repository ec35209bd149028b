"""The command `python -m jaxinfer.generate`: prompts in, answers on the terminal or as JSON lines."""
