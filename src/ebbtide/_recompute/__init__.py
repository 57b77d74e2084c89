"""Recomputation: regions whose forward runs once more in backward, with equal bits.

Note [Recomputation]
~~~~~~~~~~~~~~~~~~~~
1. During a region's forward, the frame's hooks are the innermost: a tensor saved inside leaves only a *holder* in the
   autograd graph, a number with a reference to the frame. The region's inputs, and in a selective recipe the outputs of
   expensive operators, pass through the engine's hooks like any saved tensor: same parcels, lanes, timetable and
   figures.
2. The graph owns the frame, through the holders. When backward first reads a holder without a value, the region is
   recomputed under the surroundings of forward (random numbers, autocast, attention back ends, default device), with
   the modules in the forward's state (Note [State of a region]). Each saved tensor of the recomputation becomes the
   value of the holder with the same number, at the end of the recomputation. The recomputation stops at the last needed
   saved tensor.
3. Expensive operators are not recomputed: the number of a call finds the saved output. Recomputation runs the operator
   after all if the saved output was taken by an earlier backward, was changed in place, or belongs to other arguments.
   A saved output can therefore be missing, but never wrong. Our own operators, and other regions recomputed meanwhile,
   are not numbered.
4. A recipe may hold the saved tensors downstream of an expensive call in place of the call's output; see Note [Pruning]
   in provenance.py.
5. Holders own values, and drop them node by node; no count of backwards is needed. With a retained graph a value is
   dropped after each read, and a later read recomputes the region.
"""
