"""CUDA C++ kernels, and the launchers that run them on a GPU or, unchanged, in the CPU emulator."""
