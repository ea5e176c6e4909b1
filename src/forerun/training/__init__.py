"""Training of what a drafter needs beside the model."""
