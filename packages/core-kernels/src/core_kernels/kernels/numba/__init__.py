"""CPU kernels compiled by Numba, one module per operator family; compiled code is cached on disk."""
