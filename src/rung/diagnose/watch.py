"""A function run so that the size of every value inside it comes out, by name and in the order of execution.

The function is traced to a jaxpr, and the jaxpr is run again with one reduction beside each operation. That happens
while the caller traces, so that the whole is compiled as one program: nothing is kept of a value but its size.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal


@dataclass(frozen=True)
class Sighting:
    """The size of one value, or of a value of each pass of the loops that it is in.

    Attributes:
        largest: float32 or wider, [passes of the outer loop, passes of the loop in it, ...]: the largest magnitude;
            infinite where the value has an infinity, NaN where it has a NaN.
        name: where it was computed and by which operation: ``layers.2.mlp (dot_general)``; or the argument's name.
        place: its number in the order of execution, in each loop from the outermost.
        backwards: of each loop, whether its passes run from the last index to the first.
        is_argument: it came from outside.
        is_scalar: it is one number.
    """

    largest: Any
    name: str
    place: tuple[int, ...]
    backwards: tuple[bool, ...] = ()
    is_argument: bool = False
    is_scalar: bool = False


jax.tree_util.register_dataclass(
    Sighting, data_fields=["largest"], meta_fields=["name", "place", "backwards", "is_argument", "is_scalar"]
)


def watch(
    function: Callable[..., Any], arguments: Sequence[Any], names: Sequence[str | None]
) -> tuple[Any, list[Sighting]]:
    """Return ``(function(*arguments), sightings)``; to be called under ``jax.jit``.

    Values that depend on no floating-point argument are not looked at, nor are the results of operations that make
    nothing larger than what they were given. Calls, rematerialisation, ``scan`` and ``cond`` are looked into (in a
    branch that is not taken all sizes are 0); of ``while`` and other operations that hold code the results are. A
    constant put in place of values by ``where``, as masked attention scores are, is by design: it counts for nothing
    until an operation other than sums and maxima has taken it up.

    Args:
        function: from arguments to a pytree of arrays.
        arguments: pytrees of arrays.
        names: of each array in them, in the order of ``jax.tree.leaves``; ``None``: it has none. An operation in no
            ``jax.named_scope`` is named by the argument that was last used.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = jax.tree.leaves(list(arguments))
    given = [_Value(leaf, argument=name, watched=_is_floating(leaf)) for leaf, name in zip(leaves, names, strict=True)]
    watcher = _Watcher()
    for value in given:
        if value.argument is not None and value.watched:
            watcher.see(value, value.argument, is_argument=True)
    results = watcher.run(closed, given, scope="")
    return jax.tree.unflatten(jax.tree.structure(shapes), [result.array for result in results]), watcher.sightings


def largest_magnitude(x: jax.Array) -> jax.Array:
    """Return the largest magnitude in a floating-point array, in float32 or wider; NaN or infinite where it is in it.

    The bits of non-negative floats are ordered as the numbers are, infinity above all and NaN above it; so one integer
    maximum tells both, whatever the compiler does to a maximum of floats that are not numbers.
    """
    magnitude = jnp.abs(x)
    wide = magnitude if magnitude.dtype.itemsize >= 4 else magnitude.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32 if wide.dtype.itemsize == 4 else jnp.uint64)
    return jax.lax.bitcast_convert_type(jnp.max(bits, initial=0), wide.dtype)


# How


@dataclass(frozen=True)
class _Value:
    """An array of the program, and what is known of it.

    Attributes:
        argument: the name of the argument that it is, but for its shape or dtype.
        constant: the number that all of it is.
        masks: constants that stand in it where ``where`` put them.
        watched: it depends on a floating-point argument.
    """

    array: Any
    argument: str | None = None
    constant: float | None = None
    masks: frozenset[float] = frozenset()
    watched: bool = False


def _operations(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Results that hold numbers of their operands and no others.
_MOVES = _operations(
    "broadcast_in_dim concatenate convert_element_type copy dynamic_slice dynamic_update_slice gather name "
    "optimization_barrier pad reduce_precision reshape rev select_n slice split squeeze stop_gradient transpose"
)
# Results at most as large as their operands, or as a small number. (A gather is seen all the same: what it takes from a
# table is an activation, and past the table's end it gives NaN.)
_BOUNDED = (_MOVES - {"gather"}) | _operations(
    "abs argmax argmin atan2 ceil clamp cos cummax cummin erf erfc floor is_finite logistic max min neg reduce_max "
    "reduce_min reduce_window_max round scatter sign sin sort tanh top_k"
)
_KEEPS_ONE = _operations("broadcast_in_dim convert_element_type copy name reshape squeeze stop_gradient transpose")
_KEEPS_MASKS = _MOVES | _operations("abs add clamp max min neg reduce_max reduce_min sub")
_CALLS = _operations("checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat remat2")

_AGAIN = "rematted_computation"  # JAX's scope of what a backward pass computes again
_LEAST_MASK = 1e4  # a smaller constant is no mask: it would mask nothing
_NEAR_MASK = 1e-3  # what is added to a mask moves it by less than this part


class _Watcher:
    """Runs jaxprs, and collects sightings."""

    def __init__(self, last_argument: str = "", first_place: int = 0) -> None:
        self.sightings: list[Sighting] = []
        self.last_argument = last_argument
        self._place = first_place

    def see(self, value: _Value, name: str, is_argument: bool = False) -> None:
        x = jnp.asarray(value.array)
        if not x.size or not _is_floating(x):
            return
        for mask in value.masks:
            near = jnp.isinf(x) if np.isinf(mask) else jnp.abs(jnp.abs(x) - abs(mask)) <= _NEAR_MASK * abs(mask)
            x = jnp.where(near & ((x < 0) == (mask < 0)), 0, x)
        self._add(Sighting(largest_magnitude(x), name, (), is_argument=is_argument, is_scalar=x.size == 1))

    def run(self, closed: ClosedJaxpr, arguments: Sequence[_Value], scope: str) -> list[_Value]:
        """Run a jaxpr on ``arguments``; ``scope`` is the name stack of its caller."""
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, map(_Value, closed.consts), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> _Value:
            return _literal(atom) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            with equation.ctx.manager:
                results = self._run_one(equation, operands, f"{scope}/{equation.source_info.name_stack}")
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _run_one(self, equation: Any, operands: list[_Value], scope: str) -> list[_Value]:
        name, parameters = equation.primitive.name, equation.params
        inner = parameters.get("call_jaxpr", parameters.get("jaxpr"))
        if name in _CALLS and inner is not None:
            if parameters.get("differentiated"):  # else the compiler would merge what is computed anew with the first
                arrays = jax.lax.optimization_barrier([operand.array for operand in operands])
                operands = [dataclasses.replace(o, array=a) for o, a in zip(operands, arrays, strict=True)]
            return self.run(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), operands, scope)
        if name == "scan":
            return self._scan(parameters, operands, scope)
        if name == "cond":
            return self._cond(parameters["branches"], operands, scope)
        arrays = equation.primitive.bind(
            *(operand.array for operand in operands), **equation.primitive.get_bind_params(parameters)
        )
        results = _known(name, operands, arrays if equation.primitive.multiple_results else [arrays])
        used = next((o.argument for o in operands if o.argument is not None), None) if name not in _KEEPS_ONE else None
        self.last_argument = used or self.last_argument
        if name not in _BOUNDED:
            for result in results:
                if result.watched:
                    self.see(result, _name(scope, name, self.last_argument, used is not None))
        return results

    def _scan(self, parameters: Any, operands: list[_Value], scope: str) -> list[_Value]:
        n_consts, n_carry = _constants_and_carry(parameters)
        consts, looped = operands[:n_consts], operands[n_consts:]
        carry, rows = looped[:n_carry], looped[n_carry:]
        watched = any(operand.watched for operand in operands)

        def one_pass(carried: list[Any], row: list[Any]) -> Any:
            inside = _Watcher(self.last_argument)
            given = [_Value(array, watched=watched) for array in carried]
            given += [dataclasses.replace(value, array=array) for value, array in zip(rows, row, strict=True)]
            results = [result.array for result in inside.run(parameters["jaxpr"], [*consts, *given], scope)]
            return results[:n_carry], (results[n_carry:], inside.sightings)

        carried, (outputs, seen) = jax.lax.scan(
            one_pass,
            [operand.array for operand in carry],
            [operand.array for operand in rows],
            length=parameters["length"],
            reverse=parameters["reverse"],
            unroll=parameters["unroll"],
        )
        for sighting in seen:
            backwards = (parameters["reverse"], *sighting.backwards)
            self._add(dataclasses.replace(sighting, backwards=backwards), keep_place=True)
        self._place += 1
        return [_Value(array, watched=watched) for array in [*carried, *outputs]]

    def _cond(self, branches: Sequence[ClosedJaxpr], operands: list[_Value], scope: str) -> list[_Value]:
        number, given = operands[0], operands[1:]
        self.last_argument = next((o.argument for o in given if o.argument is not None), self.last_argument)
        arrays = [operand.array for operand in given]

        def runner(branch: ClosedJaxpr, inside: _Watcher) -> Callable[..., Any]:
            def run(*arrays: Any) -> Any:
                values = [dataclasses.replace(value, array=array) for value, array in zip(given, arrays, strict=True)]
                return [result.array for result in inside.run(branch, values, scope)], inside.sightings

            return run

        nothing: list[list[Sighting]] = []  # seen in each branch where it is not taken
        places = [self._place]
        for branch in branches:
            inside = _Watcher(self.last_argument, places[-1])
            _, shapes = jax.eval_shape(runner(branch, inside), *arrays)
            nothing.append(jax.tree.map(jnp.zeros_like, shapes))
            places.append(inside._place)

        def taken(at: int) -> Callable[..., Any]:
            run = runner(branches[at], _Watcher(self.last_argument, places[at]))

            def run_one(*arrays: Any) -> Any:
                results, seen = run(*arrays)
                return results, [*nothing[:at], seen, *nothing[at + 1 :]]

            return run_one

        results, seen = jax.lax.switch(number.array, [taken(at) for at in range(len(branches))], *arrays)
        self.sightings += [sighting for of_branch in seen for sighting in of_branch]
        self._place = places[-1]
        watched = any(operand.watched for operand in operands)
        return [_Value(array, watched=watched) for array in results]

    def _add(self, sighting: Sighting, keep_place: bool = False) -> None:
        self.sightings.append(dataclasses.replace(sighting, place=(self._place, *sighting.place)))
        self._place += not keep_place


def _constants_and_carry(parameters: Any) -> tuple[int, int]:
    """Return how many operands of a ``scan`` are the same in each pass, and how many are carried."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()  # since JAX 0.12
    return len(constants), len(carry)


def _literal(atom: Literal) -> _Value:
    array = np.asarray(atom.val, atom.aval.dtype)  # type: ignore[attr-defined] # a literal is a number
    return _Value(array, constant=float(array) if array.size == 1 and _is_floating(array) else None)


def _known(primitive: str, operands: list[_Value], arrays: Sequence[Any]) -> list[_Value]:
    """Return the results of an operation with what follows for them from its operands."""
    first = operands[0] if operands else _Value(None)
    masks: frozenset[float] = frozenset()
    if primitive in _KEEPS_MASKS:
        masks = masks.union(*(operand.masks for operand in operands))
    if primitive == "select_n":
        constants = {operand.constant for operand in operands[1:] if operand.constant is not None}
        masks |= {constant for constant in constants if abs(constant) >= _LEAST_MASK}
    if primitive in ("neg", "sub"):
        masks |= {-mask for mask in (first if primitive == "neg" else operands[1]).masks}
    keeps = primitive in _KEEPS_ONE
    return [
        _Value(
            array,
            argument=first.argument if keeps else None,
            constant=first.constant if keeps else None,
            masks=masks,
            watched=any(operand.watched for operand in operands),
        )
        for array in arrays
    ]


def _name(scope: str, operation: str, argument: str, uses_it: bool) -> str:
    """Return ``layers.2.mlp (dot_general)`` of a name stack as ``/transpose(jvp(layers.2))/mlp``.

    A value that the backward pass computes again is named as the first time, and is no gradient.
    """
    parts = [part for part in re.sub(r"\b\w+\(|\)", "", scope).split("/") if part]
    again = _AGAIN in parts
    parts = [part for part in parts if part != _AGAIN]
    operation = " ".join([operation, *(part for part in parts if "->" in part)])  # an einsum's formula
    where = ".".join(part for part in parts if "->" not in part)
    if not where and argument:
        where = argument if uses_it else f"after {argument}"
    where = f"gradient of {where}".removesuffix(" of ") if "transpose(" in scope and not again else where
    return f"{where} ({operation})".lstrip()


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
