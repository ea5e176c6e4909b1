"""How the models that ship were made: `python -m recipes --help`, from the repository's root."""
