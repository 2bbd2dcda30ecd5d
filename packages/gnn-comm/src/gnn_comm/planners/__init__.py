"""Planners: each turns chunks of rows into the messages of a plan."""
