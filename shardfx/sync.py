"""Transfers of weights from one job to another: a transfer plan that each job computes
by itself, and channels that carry it out.
"""

from ._reshard.sync import (
    Channel as Channel,
    JaxChannel as JaxChannel,
    Receiver as Receiver,
    Sender as Sender,
    TransferPlan as TransferPlan,
    plan_transfer as plan_transfer,
    receive as receive,
    send as send,
)
