"""Many devices, one program: device choice, batch arithmetic, the one parallel step, gradient averaging.

Knows jax and optax; knows nothing of vision, models or the configuration.
"""
