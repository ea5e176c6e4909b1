"""Speculative decoding behind transformers' own `generate`.

>>> from forerun import zoo
>>> from forerun.runtime.load import load_model, load_tokenizer
>>> from forerun.transformers import attach
>>> model, tokenizer = load_model(zoo.TARGET), load_tokenizer(zoo.TARGET)
>>> speculative = attach(model)
>>> ids = tokenizer("one two one two one", return_tensors="pt").input_ids
>>> model.generate(ids, max_new_tokens=8, do_sample=False).shape[1] <= ids.shape[1] + 8
True
>>> speculative.last[0].stats.tokens <= 8
True
"""

from forerun.hosts.speculative import Speculative, attach, detach

__all__ = ["Speculative", "attach", "detach"]
