"""Transfers of weights from one job to another: a transfer plan, which each job
computes by itself, and channels that carry the bytes.

It may import `_plan`, `_convert`, its siblings in this room and what is below them. It
never moves an array within a job, and it never changes a receiver's arrays before all
bytes of the new revision have arrived.

A *piece* is a part of a source array that equals a part of a target array. A *buffer*
is one box of a target array in a receiving process. A *row* is the bytes that are sent
for a part of a leaf, and a *round* the rows that are sent together. A *revision* is one
version of all weights.
"""

from .channel import Channel as Channel
from .jax_channel import JaxChannel as JaxChannel
from .planning import plan_transfer as plan_transfer
from .receiver import Receiver as Receiver
from .receiving import receive as receive
from .sender import Sender as Sender
from .sending import send as send
from .transfer import TransferPlan as TransferPlan
