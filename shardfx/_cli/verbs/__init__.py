"""The verbs of the command line, a file for those of one kind.

A verb may import the files beside this folder, and of the library the public names. It never decides anything about
plans: it hands words over and shows what comes back.
"""
