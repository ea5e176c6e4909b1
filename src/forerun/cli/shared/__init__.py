"""Shared by several commands: prompts, models, running, printing."""
