"""These are programs that tests start, not modules with examples."""

collect_ignore = ["training_script.py", "sharded_script.py", "torchrun_script.py"]
