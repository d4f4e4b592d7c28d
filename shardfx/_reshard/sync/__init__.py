"""Transfers of weights from one job to another: a transfer plan that each job computes by itself, and channels that
carry it out.

It may import `_plan`, `_convert`, its siblings in this room and what is below them. It never moves an array within a
job, and it never changes a receiver's arrays before every piece of the new revision has arrived.
"""

from .codec import from_json as from_json, to_json as to_json
from .ends import Channel as Channel, receive as receive, send as send
from .planning import plan_transfer as plan_transfer
from .servers import JaxChannel as JaxChannel
from .sockets import Receiver as Receiver, Sender as Sender
from .transfer import TransferPlan as TransferPlan
