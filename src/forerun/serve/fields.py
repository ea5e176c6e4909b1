"""Every field of OpenAI's, vLLM's, llama.cpp's, TGI's and SGLang's requests that is none of ours.

A field is *served* (by a model of `protocol`), *refused* with status 501 and its name unless its
value asks for nothing, or *neutral*: it changes no text. A test compares with those projects' own
lists, so that none is dropped in silence.
"""

from __future__ import annotations

from typing import Any

REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    # What sampling this engine has not.
    "use_beam_search": ("beam search is", (False,)),
    "num_beams": ("beam search is", (1,)),
    "typical_p": ("typical_p is", (1.0,)),
    "no_repeat_ngram_size": ("no_repeat_ngram_size is", (0,)),
    "top_a": ("top_a is", (0,)),
    "tfs_z": ("tfs_z is", (1.0,)),
    "top_n_sigma": ("top_n_sigma is", (-1, -1.0)),
    "dynatemp_range": ("dynamic temperature is", (0,)),
    "dry_multiplier": ("the DRY penalty is", (0,)),
    "xtc_probability": ("XTC is", (0,)),
    "mirostat": ("mirostat is", (0,)),
    "mirostat_mode": ("mirostat is", (0,)),
    "min_keep": ("min_keep is", (0,)),
    "samplers": ("another order of samplers is", ([],)),
    "adaptive_target": ("adaptive-p is", (-1, -1.0)),
    "watermark": ("a watermark is", (False,)),
    "watermarking": ("a watermark is", (False,)),
    "do_sample": ("do_sample is (give a temperature; 0 is greedy)", (True,)),
    "custom_logit_processor": ("a logits processor of the request's own is", ()),
    "logits_processors": ("a logits processor of the request's own is", ([],)),
    # The same under another name.
    "n_predict": ("n_predict is (give max_tokens)", ()),
    "max_new_tokens": ("max_new_tokens is (give max_tokens)", ()),
    "min_new_tokens": ("min_new_tokens is (give min_tokens)", (0,)),
    "max_length": ("max_length is (give max_tokens)", ()),
    "min_length": ("min_length is (give min_tokens)", (0,)),
    "repeat_penalty": ("repeat_penalty is (give repetition_penalty)", (1.0,)),
    "bad_words_ids": ("bad_words_ids are (give bad_words)", ([],)),
    "stop_sequences": ("stop_sequences are (give stop)", ([],)),
    "stop_strings": ("stop_strings are (give stop)", ([],)),
    "n_probs": ("n_probs is (give logprobs)", (0,)),
    "top_n_tokens": ("top_n_tokens is (give top_logprobs)", (0,)),
    "return_full_text": ("return_full_text is (give echo)", (False,)),
    "decoder_input_details": ("decoder_input_details are (give echo with logprobs)", (False,)),
    "prompt_logprobs": ("prompt_logprobs is (use echo with logprobs)", (0,)),
    "input_logprobs": ("input_logprobs is (use echo with logprobs)", (False,)),
    "return_tokens": ("return_tokens is (give return_token_ids)", (False,)),
    "inputs": ("inputs is (give prompt)", ()),
    "parameters": ("parameters is (give its fields by themselves)", ({},)),
    # What ends or constrains a text.
    "stop_regex": ("stop_regex is", ([], "")),
    "no_stop_trim": ("no_stop_trim is (give include_stop_str_in_output)", (False,)),
    "repetition_detection": ("repetition_detection is", ()),
    "thinking_token_budget": ("thinking_token_budget is", (-1,)),
    "thinking_budget_tokens": ("thinking_budget_tokens is", (-1,)),
    "reasoning_budget_tokens": ("reasoning_budget_tokens is", (-1,)),
    "thinking_forced_open": ("thinking_forced_open is", (False,)),
    "t_max_predict_ms": ("a limit of time is", (0,)),
    "n_indent": ("n_indent is", (0,)),
    "grammar": ("a grammar in GBNF is (give guided_grammar, in Lark's notation)", ("",)),
    "grammar_triggers": ("a grammar in GBNF is", ([],)),
    "ebnf": ("a grammar in EBNF is (give guided_grammar, in Lark's notation)", ("",)),
    "regex": ("regex is (give guided_regex)", ("",)),
    "structural_tag": ("structural_tag is", ()),
    "force_words_ids": ("force_words_ids are", ([],)),
    "trace_decode_token_ids": ("trace_decode_token_ids is", ()),
    # What is kept between requests.
    "previous_response_id": ("keeping responses is (send the whole conversation)", ()),
    "conversation": ("keeping conversations is (send the whole conversation)", ()),
    "background": ("running in the background is", (False,)),
    "context_management": ("context_management is", ([],)),
    # Another prompt.
    "truncation": ("truncating conversations is", ("disabled",)),
    "suffix": ("inserting before a suffix is", ("",)),
    "input_prefix": ("input_prefix is", ("",)),
    "input_suffix": ("input_suffix is", ("",)),
    "truncate_prompt_tokens": ("truncating prompts is", (-1,)),
    "truncate": ("truncating prompts is", ()),
    "echo": ("echo of messages is", (False,)),
    "chat_template": ("a template of the request's own is", ("",)),
    "documents": ("documents are", ([],)),
    "guideline": ("guideline is", ("",)),
    "tool_prompt": ("tool_prompt is", ("",)),
    "prompt_embeds": ("prompt_embeds are", ()),
    "input_embeds": ("input_embeds are", ()),
    "image_data": ("images are", ([],)),
    "image": ("images are", ()),
    "audio": ("audio is", ()),
    "modalities": ("output other than text is", (["text"],)),
    "web_search_options": ("web search is", ()),
    "moderation": ("moderation is", ()),
    "functions": ("functions are", ([],)),
    "function_call": ("functions are", ("none", "auto")),
    "tools": ("tools outside a chat are", ([],)),
    "tool_choice": ("tools outside a chat are", ("none", "auto")),
    # Another model, or another shape of the answer.
    "lora": ("adapters are", ([],)),
    "lora_path": ("adapters are", ()),
    "adapter_id": ("adapters are", ("",)),
    "skip_special_tokens": ("showing special tokens is", (True,)),
    "detokenize": ("an answer without text is", (True,)),
    "response_fields": ("choosing fields of the answer is", ([],)),
    "logprob_token_ids": ("logprob_token_ids is", ([],)),
    "token_ids_logprob": ("token_ids_logprob is", ([],)),
    "post_sampling_probs": ("post_sampling_probs is", (False,)),
    "flat_logprobs": ("flat_logprobs is", (False,)),
    "return_prompt_text": ("return_prompt_text is", (False,)),
    "return_hidden_states": ("return_hidden_states is", (False,)),
    "kv_transfer_params": ("kv_transfer_params are", ({},)),
    "ec_transfer_params": ("ec_transfer_params are", ({},)),
}
"""The beginning of "... not supported by this server", and values that ask for nothing."""

NEUTRAL = frozenset(
    # Who asks, and for what account.
    {"user", "metadata", "store", "max_tool_calls",
     "background_options", "access_programs", "service_tier", "safety_identifier",
     "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id", "rid",
     "session_id", "session_params", "priority", "cache_salt", "details", "bootstrap_host",
     "bootstrap_port", "bootstrap_room"}
    # Caches, scheduling, how the answer is sent.
    | {"cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "stream_interval",
       "timings_per_token", "return_progress", "sse_ping_interval", "verbose", "backend_sampling",
       "skip_reading_prefix_cache", "skip_clone", "output_kind", "output_text_buffer_length",
       "return_token_offsets", "routed_experts_prompt_start", "return_mm_kwargs"}
    # Without effect unless another field is there, which is refused.
    | {"length_penalty", "early_stopping", "spaces_between_special_tokens", "truncation_side",
       "dynatemp_exponent", "repeat_last_n", "dry_base", "dry_allowed_length",
       "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau",
       "mirostat_eta", "adaptive_decay", "grammar_lazy", "preserved_tokens", "media_io_kwargs",
       "mm_processor_kwargs", "prompt_logprob_token_ids", "prompt_logprob_start",
       "parse_tool_calls", "extra_args",
       "logprob_start_len", "top_logprobs_num"}
    # Hints that only models which reason hear.
    | {"verbosity", "reasoning_format", "include_reasoning", "separate_reasoning",
       "stream_reasoning", "reasoning_in_content"}
)  # fmt: skip
"""They change no text."""
