"""The base of all other rooms: errors, reasons, specs, trees of arrays, boxes, and
text.

A room is a folder of the package. This room may import no other room. It never decides
how an array is sharded, and it never touches a device.
"""
