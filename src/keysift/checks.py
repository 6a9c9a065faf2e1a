"""What every stage refuses alike. Messages name the argument, what was given, what is accepted."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check_positive(**sizes: int) -> None:
    """Ints of at least 1, by the names that the caller knows them by. Raises TypeError or ValueError."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} is {size!r}; it must be an int")
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")


def check_dtype(name: str, tensor: torch.Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """A tensor of one of the dtypes. Raises TypeError."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in accepted:
        raise TypeError(f"{name} is {tensor.dtype}; it may be {', '.join(str(dtype) for dtype in accepted)}")
    check_stored(name, tensor)


def check_stored(name: str, tensor: torch.Tensor) -> None:
    """A tensor whose memory holds its numbers; kernels read memory. Raises ValueError."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; it must be torch.strided")
    if not torch.compiler.is_compiling() and tensor.is_neg():  # a trace cannot ask, and its results are no such views
        raise ValueError(f"{name} is a view that torch negates when it is read; give {name}.resolve_neg()")


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """A tensor beside another one. Raises ValueError."""
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}; {other_name} is on {other.device}")


def refuse_first(name: str, tensor: torch.Tensor, bad: torch.Tensor, accepted: str) -> None:
    """Raise ValueError naming the first place of `tensor` that is bad, and how many rows have one. Synchronises."""
    places = bad.nonzero()
    if places.numel():
        place = tuple(int(index) for index in places[0])
        rows = len(places[:, 0].unique())
        raise ValueError(
            f"{name}{list(place)} is {int(tensor[place])}; it may be {accepted} (the first of {rows} bad rows)"
        )
