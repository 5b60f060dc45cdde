"""dropkv's CUDA C ABI (include/dropkv/dropkv_cuda.h) on PyTorch tensors. Structs and their fields are the header's."""

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import torch

F16, BF16 = 1, 2
DTYPES = {torch.float16: F16, torch.bfloat16: BF16}
COMPACT_COPY, COMPACT_IN_PLACE = 1, 2


class LibraryError(RuntimeError):
    """A call that did not return DROPKV_OK."""


class Sized(ctypes.Structure):
    """A struct that begins with its own size; what is not named is zero."""

    _fields_ = [("struct_size", c_uint64)]

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Policy(Sized):
    _fields_ = [
        *[(name, c_int32) for name in ("signal", "window", "pool_kind", "pool_before", "pool_after")],
        *[(name, c_int32) for name in ("pool_past_only", "sink", "heads")],
        ("alpha", c_double),
        ("seed", c_uint64),
    ]


class Budget(Sized):
    _fields_ = [("fraction", c_double), ("tokens", c_int64)]


class View(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("sequence_stride", c_int64), ("head_stride", c_int64), ("token_stride", c_int64)]


class Cache(Sized):
    _fields_ = [
        *[(name, c_int32) for name in ("dtype", "sequences", "kv_heads", "key_dim", "value_dim", "max_tokens")],
        ("k", View),
        ("v", View),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("blocks_stride", c_int32),
        ("block_size", c_int32),
        ("offsets", c_void_p),
        ("blocks_in_pool", c_int64),
        ("rows_in_pool", c_int64),
        ("generated", c_void_p),
        ("max_generated", c_int32),
        ("reserved", c_int32),
    ]


class Rows(Sized):
    _fields_ = [
        ("q", c_void_p),
        *[(name, c_int64) for name in ("q_sequence_stride", "q_head_stride", "q_row_stride")],
        ("query_heads", c_int32),
        ("rows", c_int32),
        ("visible", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("lse", c_void_p),
        ("out", c_void_p),
        ("out_dtype", c_int32),
        ("weights", c_void_p),
    ]


class Outputs(Sized):
    _fields_ = [
        *[(name, c_void_p) for name in ("raw_scores", "scores", "offsets", "positions")],
        ("capacity", c_int64),
        *[(name, c_void_p) for name in ("output_error", "evicted_mass", "k", "v")],
        ("compact", c_int32),
        ("counters", c_void_p),
    ]


POINTER = ctypes.POINTER
SIGNATURES = {
    "dropkv_last_error": (c_char_p, []),
    "dropkv_policy_find": (c_int32, [c_char_p, POINTER(Policy)]),
    "dropkv_cuda_plan_create": (
        c_int32,
        [POINTER(Cache), c_int32, c_int32, c_int32, POINTER(Policy), POINTER(Budget), c_char_p, POINTER(c_void_p)],
    ),
    "dropkv_cuda_plan_workspace_bytes": (c_size_t, [c_void_p]),
    "dropkv_cuda_plan_capacity": (c_int64, [c_void_p]),
    "dropkv_cuda_plan_kernels": (c_char_p, [c_void_p]),
    "dropkv_cuda_plan_free": (None, [c_void_p]),
    "dropkv_cuda_score": (c_int32, [c_void_p, POINTER(Cache), POINTER(Rows), POINTER(Outputs), c_void_p, c_void_p]),
    "dropkv_cuda_select": (c_int32, [c_void_p, POINTER(Cache), POINTER(Outputs), c_void_p, c_void_p]),
    "dropkv_cuda_compact": (c_int32, [c_void_p, POINTER(Cache), POINTER(Outputs), c_void_p, c_void_p]),
    "dropkv_cuda_run": (c_int32, [c_void_p, POINTER(Cache), POINTER(Rows), POINTER(Outputs), c_void_p, c_void_p]),
    "dropkv_cuda_decode_workspace_bytes": (c_size_t, [POINTER(Cache), c_int32]),
    "dropkv_cuda_decode_prepare": (c_int32, [c_void_p, c_void_p]),
    "dropkv_cuda_decode": (
        c_int32,
        [POINTER(Cache), c_int32, c_void_p, c_void_p, c_float, c_float, c_void_p, c_void_p, c_void_p],
    ),
}


def stream() -> int:
    """PyTorch's current stream: the captured one inside torch.cuda.graph."""
    return torch.cuda.current_stream().cuda_stream


def workspace(size: int) -> torch.Tensor:
    """Filled with ones: what a kernel reads before it was written shows as NaN or -1."""
    return torch.full((max(size, 1),), 255, dtype=torch.uint8, device="cuda")


class Library:
    def __init__(self, path: str):
        self._c = ctypes.CDLL(path)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments

    def call(self, name: str, *arguments) -> None:
        """Calls a function that returns a dropkv_status."""
        status = getattr(self._c, name)(*arguments)
        if status != 0:
            raise LibraryError(f"{name}: status {status}: {self._c.dropkv_last_error().decode()}")

    def get(self, name: str, *arguments):
        """Calls a function that returns a value."""
        return getattr(self._c, name)(*arguments)

    def policy(self, name: str, **changes) -> Policy:
        policy = Policy()
        self.call("dropkv_policy_find", name.encode(), policy)
        for field, value in changes.items():
            setattr(policy, field, value)
        return policy

    def decode(self, cache: Cache, query_heads: int, q: torch.Tensor, out: torch.Tensor, scale: float, space) -> None:
        pointers = q.data_ptr(), out.data_ptr()
        self.call("dropkv_cuda_decode", cache, query_heads, *pointers, scale, 0.0, None, space.data_ptr(), stream())


class Plan:
    """One shape, policy and budget, with its workspace."""

    def __init__(self, library: Library, cache: Cache, query_heads: int, rows: int, given: bool, policy: Policy,
                 fraction: float, force_kernel: str | None = None):
        self._library, self._handle = library, c_void_p()
        force = force_kernel.encode() if force_kernel else None
        budget = Budget(fraction=fraction)
        arguments = cache, query_heads, rows, given, policy, budget, force
        library.call("dropkv_cuda_plan_create", *arguments, ctypes.byref(self._handle))
        self.workspace_bytes = library.get("dropkv_cuda_plan_workspace_bytes", self._handle)
        self.capacity = library.get("dropkv_cuda_plan_capacity", self._handle)
        self._workspace = workspace(self.workspace_bytes)

    def __del__(self):
        if self._handle:
            self._library.get("dropkv_cuda_plan_free", self._handle)

    def kernels(self) -> str:
        """Which kernels the plan's last run took, and why not faster ones."""
        return self._library.get("dropkv_cuda_plan_kernels", self._handle).decode()

    def _call(self, name: str, *structs) -> None:
        self._library.call(name, self._handle, *structs, self._workspace.data_ptr(), stream())

    def score(self, cache: Cache, rows: Rows, outputs: Outputs) -> None:
        self._call("dropkv_cuda_score", cache, rows, outputs)

    def select(self, cache: Cache, outputs: Outputs) -> None:
        self._call("dropkv_cuda_select", cache, outputs)

    def compact(self, cache: Cache, outputs: Outputs) -> None:
        self._call("dropkv_cuda_compact", cache, outputs)

    def run(self, cache: Cache, rows: Rows, outputs: Outputs) -> None:
        self._call("dropkv_cuda_run", cache, rows, outputs)
