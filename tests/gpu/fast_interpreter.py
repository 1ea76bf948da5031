"""Triton's interpreter in less time: what it says of types and shapes is worked out once, not at each operation.

Nothing here changes what a kernel computes, or what is refused.
"""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    patch_modules_once()
    skip_unread_checks()
    keep_block_types()


def patch_modules_once() -> None:
    """Patch Triton's language once for each module of device functions, not at each of their calls.

    Those patches stay, and a launch adds its own: at later calls there is nothing left to patch.
    """
    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction[Any], *args: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **options)

    interpreter.InterpretedFunction.__call__ = call


def skip_unread_checks() -> None:
    """Without `debug`, whether an integer overflows is computed at each sum and product, and thrown away."""
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def keep_block_types() -> None:
    """The parts of a block's type, and of a tensor's shape, by the element type and the numbers in the shape."""
    types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}
    arrays: dict[str, Any] = {}
    make_type, make_array_type = core.block_type.__init__, interpreter._get_np_dtype
    broadcast_both = TritonSemantic.broadcast_impl_value

    def init_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        key = (element_ty.name, tuple([s.value if isinstance(s, core.constexpr) else s for s in shape]))
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            self.plain_shape = key[1]
            types[key] = {**self.__dict__}
        else:
            self.__dict__.update(known)
            self.element_ty = element_ty

    def init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = type.plain_shape if isinstance(type, core.block_type) else ()
        known = shapes.get(shape)
        if known is None:
            numel = 1
            for size in shape:
                numel *= size
            known = shapes[shape] = core.constexpr(numel), core.tuple([core.constexpr(s) for s in shape])
        self.numel, self.shape = known

    def array_type(type: core.dtype) -> Any:  # noqa: A002
        known = arrays.get(type.name)
        if known is None:
            known = arrays[type.name] = make_array_type(type)
        return known

    def broadcast(self: TritonSemantic[Any], lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        if getattr(lhs.type, "plain_shape", ()) == getattr(rhs.type, "plain_shape", ()):
            return lhs, rhs
        return broadcast_both(self, lhs, rhs)

    core.block_type.__init__ = init_block_type
    TritonSemantic.broadcast_impl_value = broadcast
    core.tensor.__init__ = init_tensor
    interpreter._get_np_dtype = array_type
