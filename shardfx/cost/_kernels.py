"""The kernels of a TPU's program: what its compiler fuses into one, and what each of
them computes and moves.

XLA's partitioner leaves single operations. libtpu then fuses elementwise operations and
reductions with each other, and with the product before them. It pads arrays to tiles of
memory, and the dimensions of a product to the size of the matrix unit. The kernels of a
small step take most of its time, however few their operations: a convolution with few
channels fills the matrix unit badly, and the normalization around it is many kernels.

In 84 programs of 31 steps, the cycles that libtpu states in its compiled programs are
1.07 times the time of this module in the median, and 0.56 to 1.9 times in 9 of 10.
The rules and `_KERNELS_TO_BATCH` were chosen on these programs.
"""

import functools as ft
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .. import chips
from .._ground import opcodes
from .._step import HloModule, Instruction, Tile, array_of, arrays_in, padded, root_of
from ._runs import runs_of
from ._windows import Window, windows_of
from ._work import MOVED_OPERANDS, flops_of


# The seconds of most small kernels in libtpu's own estimates: 1,824 cycles of a v5e for
# an elementwise fusion, and about 300 for a product (libtpu 0.0.42). Some copies and
# reductions take less.
_KERNEL_SECONDS = 1.2e-6
_PRODUCT_SECONDS = 0.2e-6
# The rows and columns of a matrix unit, and the rows that it takes at once.
_UNIT = 128
_UNIT_ROWS = 8
# Loop-carried arrays up to this size stay in a TPU's vector memory: v5e and v6e have
# 128 MiB.
_ON_CHIP_BYTES = 2**25
# A loop-carried array may pass through these operations before it is read.
_PASSED = opcodes.REORDERINGS | {"convert"}
# A broadcast is fused with each operation that reads it.
_BROADCAST = "broadcast"
# What reads the results of these can be fused with what their operands are fused with.
_TRANSPARENT = opcodes.FUSED | opcodes.PIECES | {"parameter", "get-tuple-element"}
# These kernels move a part of an operand: as much as the operand of this number, or as
# the result (`None`).
_MOVED_OPERANDS = MOVED_OPERANDS | {"dynamic-slice": None}
# libtpu moves parts of an image to the batch of a convolution, if the batch fills no
# tile. One kernel pads the parts of an array with their neighbours, and one reorders
# them.
_KERNELS_TO_BATCH = 2
# Two operations that read the same array are fused if it has as many elements or more.
_LEAST_SHARED = 1024
_BATCH_DIMS = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_\w+->(\w+)")
_WINDOW = re.compile(r"window=\{size=([\dx]+)")


class Kernel(NamedTuple):
    """A kernel of one device's program.

    - `runs`: how often it runs in a step.
    - `flops`, `bytes`: the floating-point operations of its product, and the bytes that
      it reads and writes, of one run and with padding.
    - `has_product`: whether a matrix product or a convolution is in it.
    - `permutes`: the number of permutes that it waits for, one after the other.
    """

    runs: int
    flops: float
    bytes: float
    has_product: bool
    permutes: int = 0


def kernel_seconds(
    kernels: Sequence[Kernel],
    chip: chips.Chip,
    bandwidth_share: float,
) -> float:
    """The seconds of kernels that run one after the other. Beside a least time, each
    takes the longer of two times: its operations at the peak rate, and its bytes at a
    share of the memory's bandwidth.
    """
    flops_per_second = float(chip.flops("bfloat16")) / chip.devices_per_chip
    bandwidth = float(chip.hbm_bytes_per_second) / chip.devices_per_chip
    bytes_per_second = bandwidth_share * bandwidth
    seconds = []
    for kernel in kernels:
        busy_seconds = max(
            kernel.flops / flops_per_second, kernel.bytes / bytes_per_second
        )
        least_seconds = _PRODUCT_SECONDS if kernel.has_product else _KERNEL_SECONDS
        permute_seconds = kernel.permutes * float(chip.hop_seconds)
        seconds.append(kernel.runs * (least_seconds + permute_seconds + busy_seconds))
    return math.fsum(seconds)


def kernels_of(module: HloModule, tile: Tile) -> list[Kernel]:
    """The kernels of a partitioned program on a TPU with memory tiles of this shape."""
    runs = runs_of(module)
    loop_bodies: set[str] = set()
    for computation in module.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "while":
                loop_bodies.add(dict(instruction.called)["body"])
    kernels: list[Kernel] = []
    for name, computation in module.computations.items():
        count = sum(run.count for run in runs.get(name, ()))
        if count:
            fusions = _Fusions(computation, tile, is_loop_body=name in loop_bodies)
            kernels += fusions.kernels(count)
    return kernels


class _Fusions:
    """The fusions of a computation.

    - `depths`: for each instruction, the largest number of kernels that end before it
      on one path from the parameters.
    - `readers`: the names of the instructions that read each one.
    - `fusions`: the names of the instructions in each fusion, by its representative.
    """

    def __init__(
        self,
        computation: Mapping[str, Instruction],
        tile: Tile,
        *,
        is_loop_body: bool,
    ):
        self.computation = computation
        self.tile = tile
        self.is_loop_body = is_loop_body
        self.root = root_of(computation)
        self.windows = windows_of(computation)
        self.readers: dict[str, list[str]] = {name: [] for name in computation}
        self.depths: dict[str, int] = {}
        self.parents: dict[str, str] = {}
        # By an array and a depth, the first operation of this depth that reads it.
        first_readers: dict[tuple[str, int], str] = {}
        for name, instruction in computation.items():
            self._add(name, instruction, first_readers)
        self.fusions: dict[str, list[str]] = {}
        for name in self.parents:
            self.fusions.setdefault(self._representative(name), []).append(name)

    def _add(
        self,
        name: str,
        instruction: Instruction,
        first_readers: dict[tuple[str, int], str],
    ) -> None:
        """Adds an instruction whose operands were added before: its depth, and the
        fusion that it is in.
        """
        operands = self._operands(instruction)
        depth = 0
        for operand in operands:
            ends_kernel = self.computation[operand].opcode not in _TRANSPARENT
            depth = max(depth, self.depths[operand] + ends_kernel)
            self.readers[operand].append(name)
        self.depths[name] = depth
        if instruction.opcode not in opcodes.FUSED | opcodes.REDUCTIONS:
            return
        self.parents[name] = name
        for operand in operands:
            opcode = self.computation[operand].opcode
            if opcode in opcodes.FUSED:
                if self.depths[operand] == depth:
                    self._fuse(operand, name)
            elif self._elements(operand) >= _LEAST_SHARED:
                # Both read the array at once.
                first = first_readers.setdefault((operand, depth), name)
                if self._elements(first) == self._elements(name):
                    self._fuse(first, name)

    def _operands(self, instruction: Instruction) -> list[str]:
        """The names of an instruction's operands, without constants. In the place of a
        broadcast is its operand.
        """
        return self._without_constants(instruction.operands)

    def _without_constants(self, names: Sequence[str]) -> list[str]:
        """The operands `names` of an instruction, as `_operands` returns them."""
        operands: dict[str, None] = {}
        for operand in names:
            while self.computation[operand].opcode == _BROADCAST:
                (operand,) = self.computation[operand].operands
            if self.computation[operand].opcode not in opcodes.CONSTANTS:
                operands[operand] = None
        return list(operands)

    def _representative(self, name: str) -> str:
        """The instruction that stands for the fusion of the instruction `name`."""
        while self.parents[name] != name:
            # Shortens the path for the next call.
            self.parents[name] = self.parents[self.parents[name]]
            name = self.parents[name]
        return name

    def _fuse(self, name: str, other: str) -> None:
        """Joins the fusions of two instructions."""
        self.parents[self._representative(other)] = self._representative(name)

    def kernels(self, count: int) -> list[Kernel]:
        """The kernels of the computation, which runs `count` times."""
        kernels: list[Kernel] = []
        # Fusions that are part of the kernel of the product before them.
        fused_with_products: set[str] = set()
        for name, instruction in self.computation.items():
            if instruction.opcode in opcodes.KERNELS:
                kernels.append(
                    Kernel(
                        runs=count,
                        flops=0.0,
                        bytes=self._bytes_alone(name),
                        has_product=False,
                    )
                )
            if instruction.opcode not in opcodes.PRODUCTS:
                continue
            if name in self.windows:
                kernels.append(self._loop(name, self.windows[name], count))
                continue
            fusion = self._fusion_after(name)
            read_bytes = math.fsum(self._operand_bytes(name))
            if fusion is None or fusion in fused_with_products:
                moved_bytes = read_bytes + self._bytes(name)
            else:
                fused_with_products.add(fusion)
                moved_bytes = read_bytes + self._bytes_of_fusion(fusion, product=name)
            flops = _padded_flops(self.computation, instruction)
            kernels.append(
                Kernel(runs=count, flops=flops, bytes=moved_bytes, has_product=True)
            )
            for reordered in self._moved_to_batch(name):
                moved_bytes = 2.0 * self._bytes(reordered)
                kernels += [
                    Kernel(runs=count, flops=0.0, bytes=moved_bytes, has_product=False)
                ] * _KERNELS_TO_BATCH
        for fusion, names in self.fusions.items():
            if fusion not in fused_with_products and self._has_work(names):
                moved_bytes = self._bytes_of_fusion(fusion, product=None)
                kernels.append(
                    Kernel(runs=count, flops=0.0, bytes=moved_bytes, has_product=False)
                )
        return kernels

    def _loop(self, product: str, window: Window, count: int) -> Kernel:
        """The kernel of one step of a loop that computes a product in pieces, if its
        computation runs `count` times.
        """
        steps = window.steps
        piece_columns = _rounded_up(window.piece_size, _UNIT)
        all_columns = _rounded_up(window.pieces * window.piece_size, _UNIT)
        padding = window.pieces * piece_columns / all_columns
        flops = padding * _padded_flops(self.computation, self.computation[product])
        operand_bytes = list(self._operand_bytes(product))
        result_bytes = self._bytes(product)
        if window.is_contracted:
            # Each step adds to the whole result.
            moved_bytes = math.fsum(operand_bytes) / steps + 2 * result_bytes
        else:
            # Each step reads the other operand, and writes a piece of the result
            # beside what it computes.
            divided_bytes = operand_bytes[window.operand] + 2 * result_bytes
            whole_bytes = math.fsum(operand_bytes) - operand_bytes[window.operand]
            moved_bytes = divided_bytes / steps + whole_bytes
        return Kernel(
            runs=count * steps,
            flops=flops / steps,
            bytes=moved_bytes,
            has_product=True,
            permutes=1,
        )

    def _moved_to_batch(self, product: str) -> tuple[str, ...]:
        """The two arrays of a convolution that have images, if libtpu moves parts of
        the images to the batch; none otherwise.
        """
        instruction = self.computation[product]
        labels = _LABELS.search(instruction.attributes)
        window = _WINDOW.search(instruction.attributes)
        if self.tile is None or labels is None or window is None:
            return ()
        image, kernel = instruction.operands
        image_labels, result_labels = labels.groups()
        result_shape = array_of(instruction).shape
        positions = 1
        for label, size in zip(result_labels, result_shape, strict=True):
            if label.isdigit():
                positions *= size
        # Without neighbours it is a matrix product.
        if positions == 1 or not set(window[1]) - set("1x"):
            return ()
        # The gradient of a kernel sums over the batch, and a second image is in the
        # place of the kernel.
        is_gradient = image_labels[0] == "f"
        batch_dim = image_labels.index("f" if is_gradient else "b")
        rows, _ = self.tile
        if array_of(self.computation[image]).shape[batch_dim] >= rows:
            return ()
        return (image, kernel if is_gradient else product)

    def _fusion_after(self, product: str) -> str | None:
        """The one fusion that reads the result of a product; `None` if anything else
        does, too.
        """
        fusions = set()
        for reader in self.readers[product]:
            if reader not in self.parents:
                return None
            fusions.add(self._representative(reader))
        return fusions.pop() if len(fusions) == 1 else None

    def _has_work(self, names: Sequence[str]) -> bool:
        """Whether a fusion of the instructions `names` is a kernel: it computes
        something, and not of single numbers.
        """
        computes = any(
            self.computation[name].opcode not in opcodes.WITHOUT_WORK for name in names
        )
        return computes and any(self._elements(name) > 1 for name in names)

    def _bytes_of_fusion(self, fusion: str, product: str | None) -> float:
        """The bytes that a fusion reads and writes. It gets the result of `product`, in
        the same kernel, without reading it.
        """
        names = set(self.fusions[fusion])
        read: dict[str, None] = {}
        written_bytes = []
        for name in self.fusions[fusion]:
            instruction = self.computation[name]
            operands = instruction.operands
            if instruction.opcode == "dynamic-update-slice":
                # It writes into its first operand, in place.
                operands = operands[1:]
            read |= dict.fromkeys(self._without_constants(operands))
            is_result = self.computation[name] is self.root
            if is_result or not names.issuperset(self.readers[name]):
                written_bytes.append(self._written_bytes(instruction))
        read_bytes = []
        for name in read:
            if name not in names and name != product:
                read_bytes.append(self._read_bytes(name))
        return math.fsum(read_bytes) + math.fsum(written_bytes)

    def _written_bytes(self, instruction: Instruction) -> float:
        """The bytes that an instruction in a fusion writes: those of an update alone."""
        if instruction.opcode == "dynamic-update-slice":
            return self._bytes(instruction.operands[1])
        return _padded_bytes(instruction.result, self.tile)

    def _bytes_alone(self, name: str) -> float:
        """The bytes that an operation reads and writes that is a kernel of its own."""
        instruction = self.computation[name]
        if instruction.opcode in _MOVED_OPERANDS:
            operand_number = _MOVED_OPERANDS[instruction.opcode]
            moved_part = name
            if operand_number is not None:
                moved_part = instruction.operands[operand_number]
            return 2.0 * self._bytes(moved_part)
        read_bytes = map(self._read_bytes, self._operands(instruction))
        return self._bytes(name) + math.fsum(read_bytes)

    def _operand_bytes(self, product: str) -> Iterator[float]:
        """Yields the bytes of a product's operands. A TPU reads float32 as bfloat16."""
        for operand in self._operands(self.computation[product]):
            operand_bytes = self._read_bytes(operand)
            if self.computation[operand].result.startswith("f32"):
                operand_bytes /= 2
            yield operand_bytes

    def _read_bytes(self, name: str) -> float:
        """The bytes that one kernel reads of an array in memory."""
        if self.is_loop_body and self._is_on_chip(name):
            return 0.0
        return self._bytes(name)

    def _is_on_chip(self, name: str) -> bool:
        """Whether an array in the body of a loop is a loop-carried one that is small
        enough to stay in on-chip memory.
        """
        instruction = self.computation[name]
        if sum(array.bytes for array in arrays_in(instruction.result)) > _ON_CHIP_BYTES:
            return False
        while instruction.opcode in _PASSED:
            instruction = self.computation[instruction.operands[0]]
        if instruction.opcode != "get-tuple-element":
            return False
        return self.computation[instruction.operands[0]].opcode == "parameter"

    def _bytes(self, name: str) -> float:
        return _padded_bytes(self.computation[name].result, self.tile)

    def _elements(self, name: str) -> int:
        return _elements_of(self.computation[name].result)


@ft.lru_cache(maxsize=65536)
def _padded_bytes(result: str, tile: Tile) -> float:
    """The bytes of arrays of a result type in tiles of memory."""
    padded_bits = 0
    for array in arrays_in(result):
        padded_bits += array.bits * math.prod(padded(array.shape, tile))
    return padded_bits / 8


@ft.lru_cache(maxsize=65536)
def _elements_of(result: str) -> int:
    """The number of elements of the arrays of a result type."""
    return sum(math.prod(array.shape) for array in arrays_in(result))


def _padded_flops(
    computation: Mapping[str, Instruction],
    product: Instruction,
) -> float:
    """The floating-point operations of a product whose dimensions are padded to the
    size of the matrix unit.
    """
    flops = flops_of(computation, product)
    if not flops:
        return 0.0
    shape = array_of(product).shape
    elements = math.prod(shape)
    summed = round(flops / (2 * elements))
    labels = _LABELS.search(product.attributes)
    if product.opcode == "convolution" and labels is not None:
        features = shape[labels[2].index("f")]
        rows = _rounded_up(elements // features, _UNIT_ROWS)
        columns = _rounded_up(features, _UNIT)
        # The features of the positions along all but the first dimension of the window
        # are summed at once.
        window = _WINDOW.search(product.attributes)
        taps = int(window[1].split("x")[0]) if window is not None else 1
        padded_sum = taps * _rounded_up(summed / taps, _UNIT)
        return 2.0 * rows * columns * padded_sum

    match = _BATCH_DIMS.search(product.attributes)
    batch_dims = match[1].count(",") + 1 if match is not None and match[1] else 0
    batches = math.prod(shape[:batch_dims])
    # The result has the dimensions of the right operand last.
    right_elements = math.prod(array_of(computation[product.operands[1]]).shape)
    columns = max(1, right_elements // (batches * summed))
    rows = max(1, elements // (batches * columns))
    # Either operand can be the one that stays in the unit.
    padded_elements = min(
        _rounded_up(rows, _UNIT_ROWS) * _rounded_up(columns, _UNIT),
        _rounded_up(columns, _UNIT_ROWS) * _rounded_up(rows, _UNIT),
    )
    return 2.0 * batches * padded_elements * _rounded_up(summed, _UNIT)


def _rounded_up(size: float, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return math.ceil(size / multiple) * multiple
