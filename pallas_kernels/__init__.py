"""Kernels and their plain-XLA twins. A leaf: knows arrays, never requests, never imports jaxinfer."""
