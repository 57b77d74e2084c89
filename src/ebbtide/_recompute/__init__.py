"""Regions that run again in backward: what they need for it, and how it is done so that every bit comes out the same.

Note [Run again]
~~~~~~~~~~~~~~~~
1. While a region runs forward, its frame's hooks are the innermost: what autograd saves inside leaves nothing but a
   *holder* in the graph, a number and a reference to the frame. The region's inputs, and in a selective recipe the
   outputs of its dear operators, go through the desk like any save: same parcels, lanes, timetable and figures.
2. The graph owns the frame, through the holders. When backward first reads a holder that has no value, the region runs
   again, under what surrounded it in forward (random numbers, autocast, attention back ends, default device) and in the
   state its modules were in (Note [State of a region]), and each save of this second run becomes the value of the
   holder with the same number, when the run is over. It stops at the last one that is needed.
3. A dear operator is not run again: its call number says which of the held outputs is its result. If that one is gone
   (an earlier backward took it), was changed in place since or was of other arguments, the operator simply runs again.
   So a held output can be missing, but never wrong. What we do ourselves meanwhile, and other regions that run again
   in between, is not numbered.
4. Instead of what a dear operator returns, what that leads to may be held (Note [Left out] in absent.py).
5. Values belong to holders and die with them, node by node; nothing is counted per backward. Where the graph is kept,
   a value is dropped when it was read, and a later read runs the region once more.
"""
