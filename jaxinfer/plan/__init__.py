"""The command `python -m jaxinfer.plan`: what a model needs on a chip and how fast it can be, without the chip."""
