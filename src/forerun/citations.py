"""BibTeX entries of the papers behind the parts, keyed by a short name."""

from __future__ import annotations

BIBTEX: dict[str, str] = {
    "leviathan2023": """\
@inproceedings{leviathan2023speculative,
  title     = {Fast Inference from Transformers via Speculative Decoding},
  author    = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year      = {2023},
  note      = {arXiv:2211.17192}
}
""",
    "chen2023": """\
@article{chen2023sampling,
  title   = {Accelerating Large Language Model Decoding with Speculative Sampling},
  author  = {Chen, Charlie and Borgeaud, Sebastian and Irving, Geoffrey and
             Lespiau, Jean-Baptiste and Sifre, Laurent and Jumper, John},
  journal = {arXiv preprint arXiv:2302.01318},
  year    = {2023}
}
""",
    "gammatune2025": """\
@article{gautam2025gammatune,
  title   = {Token-Driven {GammaTune}: Adaptive Calibration for Enhanced Speculative Decoding},
  author  = {Gautam, Aayush and Shrestha, Susav and Reddy, Narasimha},
  journal = {arXiv preprint arXiv:2504.00030},
  year    = {2025}
}
""",
    "mamou2024": """\
@article{mamou2024dynamic,
  title   = {Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
             Models},
  author  = {Mamou, Jonathan and Pereg, Oren and Korat, Daniel and Berchansky, Moshe and
             Timor, Nadav and Wasserblat, Moshe and Schwartz, Roy},
  journal = {arXiv preprint arXiv:2405.04304},
  year    = {2024}
}
""",
    "gante2023": """\
@misc{gante2023assisted,
  title  = {Assisted Generation: a new direction toward low-latency text generation},
  author = {Gante, Joao},
  year   = {2023},
  doi    = {10.57967/hf/0638},
  url    = {https://huggingface.co/blog/assisted-generation}
}
""",
    "saxena2023": """\
@misc{saxena2023lookup,
  title  = {Prompt Lookup Decoding},
  author = {Saxena, Apoorv},
  year   = {2023},
  url    = {https://github.com/apoorvumang/prompt-lookup-decoding}
}
""",
}


def bibtex(*names: str) -> str:
    """The entries of some names, one after the other.

    >>> print(bibtex("saxena2023"))
    @misc{saxena2023lookup,
    ...
    """
    return "\n".join(BIBTEX[name] for name in names)
