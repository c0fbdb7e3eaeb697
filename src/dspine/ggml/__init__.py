"""ggml from Python: graphs and tensors on the stock library; nothing above sees a pointer."""

from dspine.ggml.device import Backend, Device, default_device, devices
from dspine.ggml.graph import Bound, Graph
from dspine.ggml.library import load, loaded, version
from dspine.ggml.tensor import Tensor
from dspine.ggml.types import TensorType, row_bytes, type_by_name, type_by_number
from dspine.ggml.weights import HostTensor, WeightStore, quantise

__all__ = [
    "Backend",
    "Bound",
    "Device",
    "Graph",
    "HostTensor",
    "Tensor",
    "TensorType",
    "WeightStore",
    "default_device",
    "devices",
    "load",
    "loaded",
    "quantise",
    "row_bytes",
    "type_by_name",
    "type_by_number",
    "version",
]
