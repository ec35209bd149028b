"""`python -m jaxinfer.native`: compiles the native CPU kernels for this machine, once."""
