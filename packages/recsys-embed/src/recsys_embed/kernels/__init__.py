"""CPU kernels of the tiers, the exchange and the access statistics (Numba)."""
