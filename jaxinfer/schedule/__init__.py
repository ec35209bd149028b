"""Host side scheduling: which sequence computes which tokens in which pages. No jax here."""
