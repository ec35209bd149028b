"""The command `python -m jaxinfer.fetch`: puts the built-in model into the cache folder, once."""
