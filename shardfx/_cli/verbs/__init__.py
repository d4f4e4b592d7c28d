"""The verbs of the command line, with similar verbs in one file.

A verb may import the other files of `_cli`, and the public names of the library. It
never decides anything about plans: it passes arguments to the library and prints the
result.
"""
