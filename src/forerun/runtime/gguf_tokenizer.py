"""The tokenizer of a GGUF file, from its metadata.

`transformers` builds one too, in 17 s for SmolLM2, and splits text as GPT-2 does whatever the file
says: other ids for digits that are not ASCII.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from forerun.errors import UnsupportedModelError
from forerun.runtime.gguf import GGUF

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_CL100K.format(digits=""),),
    "llama-bpe": (_CL100K.format(digits="{1,3}"),),
}
"""Rules by which text is split before byte pairs are merged, by `tokenizer.ggml.pre`."""
SAME = {
    "deepseek-r1-qwen": "qwen2",
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
}
"""Other names of these."""
_NORMAL, _CONTROL, _USER, _BYTE = 1, 3, 4, 6  # types of tokens


def tokenizer_of(file: GGUF) -> Any:
    """The tokenizer, with its template for chats, as `transformers` has them;
    `UnsupportedModelError` if it is of a kind or with a rule that is not known here."""
    from transformers import PreTrainedTokenizerFast

    metadata = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    kind, tokens = metadata.get("model"), metadata.get("tokens")
    makers = {"gpt2": _byte_pairs, "llama": _sentence_pieces}
    if kind not in makers or not tokens:
        raise UnsupportedModelError(
            f"{file.path.name}: a tokenizer of the kind {kind!r} is not known here (known: "
            f"{', '.join(makers)}); use the model's safetensors"
        )
    tokenizer = makers[kind](metadata, file.path.name)
    types = list(zip(tokens, metadata.get("token_type", ()), strict=False))
    named: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        place = metadata.get(f"{key}_token_id")
        if place is not None and place < len(tokens):
            named[f"{name}_token"] = tokens[place]
    user = [token for token, what in types if what == _USER]
    special = [token for token, what in types if what == _CONTROL]
    special += {*named.values()} - {*special, *user}
    # At once: each call prepares all there are, 8 s for Gemma 3's 6,400.
    tokenizer.add_special_tokens([AddedToken(x, normalized=False) for x in special])
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in user])
    begins = kind == "llama" or _rule(metadata) == "llama-bpe"  # where the file does not say
    if metadata.get("add_bos_token", begins) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["bos_token_id"])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.get("context_length", 1 << 20)),
        **named,
    )
    made._tokenizer = tokenizer  # given at once it is copied, by way of JSON: 33 MB of SmolLM2's
    return made


def _rule(metadata: dict[str, Any]) -> str:
    rule = str(metadata.get("pre", "gpt-2"))
    return SAME.get(rule, rule)


def _byte_pairs(metadata: dict[str, Any], name: str) -> Tokenizer:
    rule = _rule(metadata)
    if rule not in SPLITS:
        raise UnsupportedModelError(
            f"{name}: its text is split by the rule {rule!r}, which is not known here (known: "
            f"{', '.join(SPLITS)}); use the model's safetensors"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["merges"]]
    vocabulary = {token: place for place, token in enumerate(metadata["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in SPLITS[rule]]
    tokenizer.pre_tokenizer = pre.Sequence(
        [*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(metadata: dict[str, Any], name: str) -> Tokenizer:
    """Pieces with scores: of the pairs that make a piece, the best-scored one is merged first."""
    tokens, scores = metadata["tokens"], metadata["scores"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    types = metadata.get("token_type") or [_NORMAL] * len(tokens)
    pairs = []
    for token, score, what in zip(tokens, scores, types, strict=True):
        if what == _NORMAL:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            pairs += [(score, a, b) for a, b in halves if a in vocabulary and b in vocabulary]
    pairs.sort(key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    unknown = metadata.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(a, b) for _, a, b in pairs],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        )
    )
    prefix = metadata.get("add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer
