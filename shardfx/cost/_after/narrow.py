"""The element types in which compilers send: bfloat16 before a TPU's products, and float32 for bfloat16 on CPUs."""

import math

from .._collective import KINDS
from .._hlo_text import HloModule, Instruction
from .._hlo_types import array_of
from .graph import carried, contracted, in_each, index_of, loops_of, users_of


_SENDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
_PRODUCTS = ("dot", "convolution")
# The result has the element type of these operands; `None` stands for all of them.
_PASSES_ON: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        "all-gather all-to-all collective-permute collective-broadcast broadcast concatenate copy pad reshape reverse "
        "slice transpose bitcast maximum minimum clamp sort convert".split()
    ),
    "dynamic-slice": (0,),
    "dynamic-update-slice": (0, 1),
    "gather": (0,),
    "select": (1, 2),
}


def widened(module: HloModule) -> HloModule:
    """The module with bfloat16 sent as float32."""

    def wide(own: Instruction) -> Instruction:
        if own.opcode not in KINDS or "bf16[" not in own.result:
            return own
        return own._replace(result=own.result.replace("bf16[", "f32["))

    return in_each(module, lambda _, name, own: {key: wide(one) for key, one in own.items()})


def narrowed(module: HloModule) -> HloModule:
    """The module with float32 sent as bfloat16 where nothing but products at the default precision reads it."""
    reads = _Reads(module)

    def narrow(name: str, own: Instruction) -> Instruction:
        if own.opcode not in _SENDS or array_of(own).dtype != "f32" or not reads.narrow(name, own.name):
            return own
        return own._replace(result=own.result.replace("f32[", "bf16["))

    return in_each(module, lambda _, name, own: {key: narrow(name, one) for key, one in own.items()})


class _Reads:
    """Which values of a module are only read as bfloat16, as XLA's BFloat16Propagation finds them."""

    def __init__(self, module: HloModule):
        self.module = module
        self.users = {name: users_of(own) for name, own in module.computations.items()}
        self.loops: dict[tuple[str, str], tuple[str, str]] = {}
        self.inside: dict[str, tuple[str, str]] = {}
        for name, own in module.computations.items():
            for loop, body, _ in loops_of(module, own):
                self.loops[name, loop.operands[0]] = (loop.name, body)
                self.inside[body] = (name, loop.name)
        self.known: dict[tuple[str, str], bool] = {}

    def narrow(self, name: str, value: str) -> bool:
        """Whether all that uses a value reads it as bfloat16."""
        if (name, value) not in self.known:
            self.known[name, value] = True  # what a loop carries depends on itself
            users = self.users[name][value]
            is_read = bool(users) and not self.module.computations[name][value].is_root
            self.known[name, value] = is_read and all(self.reads(name, user, value) for user in users)
        return self.known[name, value]

    def reads(self, name: str, user: Instruction, value: str) -> bool:
        if user.opcode in _PRODUCTS:
            return "operand_precision" not in user.attributes and not self.is_by_vector(name, user)
        if user.opcode == "convert":
            return array_of(user).dtype == "bf16" or (array_of(user).dtype == "f32" and self.narrow(name, user.name))
        if user.opcode == "tuple":
            return all(self.carries(name, user, at) for at, own in enumerate(user.operands) if own == value)
        if user.opcode not in _PASSES_ON:
            return False
        passes = _PASSES_ON[user.opcode]
        is_passed = passes is None or all(at in passes for at, own in enumerate(user.operands) if own == value)
        return is_passed and self.narrow(name, user.name)

    def is_by_vector(self, name: str, product: Instruction) -> bool:
        """Whether a side of a product has nothing but what is added up: it is multiplied and added in float32."""
        around = self.module.computations[name]
        inner = contracted(around, product)
        if inner is None:
            return False
        made = math.prod(array_of(product).shape) * inner
        return any(math.prod(array_of(around[operand]).shape) == made for operand in product.operands)

    def carries(self, name: str, made: Instruction, index: int) -> bool:
        """Whether an element of the tuple that a loop begins with, or ends a trip with, is only read as bfloat16."""
        if (name, made.name) in self.loops:
            loop, body = self.loops[name, made.name]
        elif made.is_root and name in self.inside:
            body = name
            name, loop = self.inside[name]
        else:
            return False
        key = (body, f"#{index}")
        if key not in self.known:
            self.known[key] = True
            inner, outer = self.module.computations[body], self.module.computations[name]
            condition = self.module.computations[dict(outer[loop].called)["condition"]]
            taken = [(body, own) for own, at in carried(inner).items() if at == index]
            taken += [(name, own.name) for own in self.users[name][loop] if index_of(own) == index]
            unread = not any(at == index for at in carried(condition).values())
            self.known[key] = unread and all(
                not self.users[scope][own] or self.narrow(scope, own) for scope, own in taken
            )
        return self.known[key]
