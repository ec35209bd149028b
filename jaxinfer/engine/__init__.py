"""Joins host and device: loads a model, runs the loop, gives answers."""

from jaxinfer.engine.llm import LLM
from jaxinfer.engine.load import LoadedEngine, load_engine
from jaxinfer.engine.loop import Engine

__all__ = ["LLM", "Engine", "LoadedEngine", "load_engine"]
