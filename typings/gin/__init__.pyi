"""Types of what the package uses of gin-config, which has none of its own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from gin import config as config

_F = TypeVar("_F", bound=Callable[..., Any])

REQUIRED: Any

@overload
def configurable(name_or_fn: _F) -> _F: ...
@overload
def configurable(
  name_or_fn: str | None = None,
  module: str | None = None,
  allowlist: Sequence[str] | None = None,
  denylist: Sequence[str] | None = None,
) -> Callable[[_F], _F]: ...
def __getattr__(name: str) -> Any: ...
