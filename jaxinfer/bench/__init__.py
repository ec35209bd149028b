"""Measures the engine: a whole workload (offline), single steps beside a bound (steps), start-up (start)."""
