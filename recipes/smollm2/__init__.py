"""How the memory and the head that ship for SmolLM2 were made: prompts, answers, weights."""
