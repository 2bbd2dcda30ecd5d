"""Differentiable graph and embedding operators."""
