"""Kernel sources: Numba for the CPU, CUDA C++ for NVIDIA GPUs."""
