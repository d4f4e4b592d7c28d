"""What a peer of a publisher sends and receives, for tests that play one."""

from shardfx._reshard.sync import (
    frames as frames,
    handshake as handshake,
    messages as messages,
)
from shardfx._reshard.sync.line import Line as Line
