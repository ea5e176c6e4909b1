"""Inputs and output of an infer request, in buffers that stay where they are.

Between two passes the caches of the processor are cold, so every object touched costs: small
integers are written through memory views, and a tensor is bound again only when its size changes.
"""

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

LARGEST_BUFFER = 64
"""Largest size whose buffer is kept; larger ones read prompts and seldom come twice."""
_WIDE = {"input_ids", "position_ids", "wanted"}  # inputs of int64


class InferRequest:
    """An infer request of a compiled graph of the inputs of `export.INPUTS` and `nodes.ROWS`, and
    an output `(n, V)`."""

    def __init__(self, compiled: ov.CompiledModel, vocab_size: int) -> None:
        self._request = compiled.create_infer_request()
        self.inputs = compiled.inputs
        ports = enumerate(compiled.inputs)  # what falls out of a graph leaves its name to an input
        self._index = {name: i for i, port in ports for name in port.get_names()}
        self._buffers: dict[tuple[str, int], tuple[memoryview, ov.Tensor]] = {}
        self._bound: dict[str, tuple[Any, ov.Tensor]] = {}  # OpenVINO does not keep their memory
        self._floats: dict[str, tuple[NDArray[np.float32], ov.Tensor]] = {}
        self._logits = np.empty((0, vocab_size), np.float32)
        self._outputs: dict[int, tuple[NDArray[np.float32], ov.Tensor]] = {}
        self.longest = self.input("max_context_len", 1)  # the one number of `max_context_len`

    def infer(self) -> None:
        self._request.start_async()
        self._request.wait()

    def set(self, port: Any, tensor: ov.Tensor) -> None:
        """Bind a tensor that the caller owns."""
        self._request.set_tensor(port, tensor)

    def input(self, name: str, size: int) -> memoryview:
        """The buffer of an input for `size` numbers, bound; of int64 for tokens, else of int32."""
        if (held := self._buffers.get((name, size))) is None:
            array = np.zeros(size, np.int64 if name in _WIDE else np.int32)
            shape = (-1, 1) if name in ("input_ids", "position_ids") else (-1,)
            shaped = array.reshape(() if name.endswith("max_context_len") else shape)
            view = array.data.cast("B").cast("q" if name in _WIDE else "i")
            held = view, ov.Tensor(shaped, shared_memory=True)
            if size <= LARGEST_BUFFER:
                self._buffers[name, size] = held
        view, tensor = held
        if self._bound.get(name) is not held:
            self._request.set_input_tensor(self._index[name], tensor)
            self._bound[name] = held
        return view

    def has(self, name: str) -> bool:
        return name in self._index

    def array(self, name: str, values: NDArray[Any]) -> None:
        """Bind a copy of these numbers."""
        self._request.set_input_tensor(self._index[name], ov.Tensor(values))

    def floats(self, name: str, size: int, width: int) -> NDArray[np.float32]:
        """The buffer of an input of `(size, 1, width)` numbers, bound; kept while its size is."""
        held = self._floats.get(name)
        if held is None or held[0].shape != (size, 1, width):
            array = np.zeros((size, 1, width), np.float32)
            held = self._floats[name] = array, ov.Tensor(array, shared_memory=True)
            self._request.set_input_tensor(self._index[name], held[1])
        return held[0]

    def output(self, size: int) -> NDArray[np.float32]:
        """The buffer of `(size, V)` logits, bound; the next pass overwrites it."""
        held = self._outputs.get(size)
        if held is None:
            if size > len(self._logits):
                self._logits = np.empty((size, self._logits.shape[1]), np.float32)
                self._outputs.clear()
            held = self._logits[:size], ov.Tensor(self._logits[:size], shared_memory=True)
            self._outputs[size] = held
        logits, tensor = held
        if self._bound.get("logits") is not held:
            self._request.set_output_tensor(0, tensor)
            self._bound["logits"] = held
        return logits

    def states(self) -> NDArray[np.float32]:
        """`(tokens, width)` of the output that `nodes.tap` added; the next pass overwrites it."""
        data = self._request.get_output_tensor(1).data
        return data.reshape(len(data), -1)
