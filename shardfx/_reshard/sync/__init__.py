"""Transfers of weights from one job to another: a transfer plan, which each job
computes by itself, and channels that carry the bytes.

It may import `_plan`, `_convert`, its siblings in this room and what is below them. It
never moves an array within a job, and it never changes a receiver's arrays before all
bytes of the new revision have arrived.

A *piece* is a part of a source array that equals a part of a target array. A *buffer*
is one box of a target array in a receiving process. A *revision* is one version of all
weights.
"""

from .codec import from_json as from_json, to_json as to_json
from .endpoints import Channel as Channel, receive as receive, send as send
from .planning import plan_transfer as plan_transfer
from .servers import JaxChannel as JaxChannel
from .sockets import Receiver as Receiver, Sender as Sender
from .transfer import TransferPlan as TransferPlan
