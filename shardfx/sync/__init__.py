"""Weights from one job to another: a transfer plan that both compute alone, and the channels that carry it out.

It may import `_plan`, `_convert`, `_reshard` and what is below them. It never moves an array within a job, and it never
changes what a receiver has before every piece of the new revision has arrived.
"""

from ._channel import Channel as Channel
from ._ends import receive as receive, send as send
from ._plan import TransferPlan as TransferPlan, plan_transfer as plan_transfer
from ._sockets import Receiver as Receiver, Sender as Sender
