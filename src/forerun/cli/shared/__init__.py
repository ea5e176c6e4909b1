"""What several commands share: prompts, models, running, printing."""
