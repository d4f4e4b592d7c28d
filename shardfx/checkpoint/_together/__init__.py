"""How several processes make one save: they compare what they were asked for, do it, and hear of whatever goes wrong.

It may import the errors alone. It never runs a program on devices, and never waits without end: notes go through JAX's
coordination service. The first process, the leader, calls the others; each leaves it a note of its arguments, then one
of how its writing went. The leader compares the notes, does what one process does alone (making the files, renaming
them), and answers. A process that leaves by an error, Ctrl-C too, says so in its note, and a dead one gives no signs of
life; either way the leader answers all others within 30 seconds.
"""
