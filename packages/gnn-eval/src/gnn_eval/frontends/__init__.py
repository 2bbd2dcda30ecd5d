"""Front ends: a model's call becomes a program."""
