"""What every other room stands on: errors, reasons, words, specs, trees of arrays, and boxes.

It may import nothing of this package. It never decides anything about a plan, and it never touches a device.
"""
