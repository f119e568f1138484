"""The rig of the matrix test: two processes that hold all ranks of a combination, and the combinations."""
