"""What every stage refuses alike. Messages name the argument, what was given, what is accepted."""

import torch


def check_dtype(name: str, tensor: torch.Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """A tensor of one of the dtypes. Raises TypeError."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in accepted:
        raise TypeError(f"{name} is {tensor.dtype}; it may be {', '.join(str(dtype) for dtype in accepted)}")


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
