"""The base of all other rooms: errors, reasons, specs, trees of arrays, boxes, and text.

It may import nothing of this package. It never decides anything about a plan, and it never touches a device.
"""
