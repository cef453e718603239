"""The control plane: decides where pages live. NumPy and the standard library only."""
