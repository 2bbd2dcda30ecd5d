"""The training script is a program that tests start, not a module with examples."""

collect_ignore = ["training_script.py"]
