"""The runtime that programs run on when they are given none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from rootlace.client.endpoint import RuntimeEndpoint

# The only process-wide state in the package; `set_default_backend` exists to set it.
_default: list[Any] = []


def set_default_backend(backend: Any) -> None:
    """Run programs on `backend` (a Runtime, Engine or RuntimeEndpoint) if they are given none.

    None: there is no default any more.
    """
    if backend is not None:
        endpoint_of(backend)
    _default[:] = [] if backend is None else [backend]


def endpoint_of(backend: Any = None) -> RuntimeEndpoint:
    """The endpoint behind `backend`, or behind the default one.

    Raises InvalidRequest when there is none, TypeError for an object that is not a backend.
    """
    from rootlace.client.endpoint import RuntimeEndpoint

    if backend is None:
        if not _default:
            raise InvalidRequest(
                "no backend: call rootlace.set_default_backend(rootlace.Runtime(model=...)), "
                "or give backend=..."
            )
        backend = _default[0]
    endpoint = getattr(backend, "endpoint", backend)
    if not isinstance(endpoint, RuntimeEndpoint):
        raise TypeError(
            f"a backend is a Runtime or a RuntimeEndpoint, not {type(backend).__name__}"
        )
    return endpoint


def flush_cache(backend: Any = None, empty_cache: bool = True) -> bool:
    """Forget every cached prefix that is not in use. False when there is no backend at all."""
    if backend is None and not _default:
        return False
    endpoint_of(backend).flush_cache()
    return True


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """The runtime's counters and the model's description; None when there is no backend."""
    if backend is None and not _default:
        return None
    return endpoint_of(backend).get_server_info()
