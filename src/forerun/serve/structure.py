"""Structured output: what a request wants its text to be, as a constraint of its sampling."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from forerun.errors import ForerunError, MissingExtraError
from forerun.grammar import Grammars
from forerun.requests import Constraint
from forerun.serve.errors import bad, unsupported
from forerun.serve.protocol import Generation

KEPT = 32  # constraints that are kept compiled: clients send the same one again and again
LONGEST = 100_000  # characters of a schema or grammar


COMPILE_SECONDS = 5.0  # a client waits for its constraint, and those compiled before it


class Structures:
    """Compiles what requests ask for, in a thread of its own: others go on being tokenized."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        self._compiled = lru_cache(KEPT)(self._compile)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="forerun-constraints")
        self._grammars = self._pool.submit(Grammars, tokenizer, vocab_size, sorted(eos))
        """Made before the first request needs it: it takes seconds for a large vocabulary."""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def of(self, request: Generation, calling: str | None = None) -> Constraint | None:
        """The constraint of a request, if it has one; `calling` is the grammar of its tools.

        Raises:
            ApiError: 400 for one that is wrong or takes too long, or more than one; 501 without
                the extra.
        """
        given = asked(request)
        if calling is not None:
            given = [("tools", "lark", calling)]
        if not given:
            return None
        if len(given) > 1:
            raise bad(f"give one of {' and '.join(field for field, *_ in given)}", given[1][0])
        ((field, kind, value),) = given
        text = json.dumps(value)
        if len(text) > LONGEST:
            raise bad(f"at most {LONGEST} characters of schema or grammar", field)
        await asyncio.wait([asyncio.wrap_future(self._grammars)])
        compiled, events = self._compiled, asyncio.get_running_loop()
        work = events.run_in_executor(self._pool, compiled, field, kind, text)
        try:
            return await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            raise bad(f"{field} takes longer than {COMPILE_SECONDS:g} s to read", field) from None

    def _compile(self, field: str, kind: str, text: str) -> Constraint:
        try:
            made: Constraint = getattr(self._grammars.result(), kind)(json.loads(text))
        except MissingExtraError as error:
            raise unsupported(
                "structured output without the extra forerun[grammar] is", field
            ) from error
        except ForerunError as error:
            raise bad(str(error), field) from error
        return made


def asked(request: Generation) -> list[tuple[str, str, Any]]:
    """The field, what `Grammars` calls it, and what it says: of everything that was asked for."""
    out: list[tuple[str, str, Any]] = []
    if (form := request.response_format) is not None and form.type != "text":
        schema = None
        if form.type == "json_schema":
            if form.json_schema is None:
                raise bad(
                    "response_format of type json_schema needs json_schema", "response_format"
                )
            schema = form.json_schema.json_schema
        out.append(("response_format", "json", schema))
    nested = request.structured_outputs
    given = [("json_schema", "json", request.json_schema)]
    for name in ("json", "regex", "choice", "grammar"):
        own = "lark" if name == "grammar" else name
        given.append((f"guided_{name}", own, getattr(request, f"guided_{name}")))
        within = getattr(nested, "json_schema" if name == "json" else name, None)
        given.append(("structured_outputs", own, within))
    out += [entry for entry in given if entry[-1] is not None]
    if nested is not None and nested.json_object:
        out.append(("structured_outputs", "json", None))
    return out
