"""Training of learned row weights: a model is read with a bounded state, and small networks learn which rows it needs.

The model itself is never changed.
"""
