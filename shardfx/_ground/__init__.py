"""The base of all other rooms: errors, reasons, specs, trees of arrays, boxes, and text.

A room is a folder of the package. The files of this room import no other room. They never decide how an array is
sharded, and they never touch a device.
"""
