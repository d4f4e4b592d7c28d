"""How much memory a traced step takes: its program in one line, the layout of each value, and when each is live.

It may import the ground values, plans and meshes. It never compiles, and never says what fits: that is `fit`.
"""
