"""Adapters between kvcore and the frameworks that embed it.

`for_transformers` is a cache for Hugging Face transformers; others follow.

One module per framework (PyTorch, JAX, transformers, TensorRT), each imported by name and only by
those who use it: `import kvcore_adapters` imports no framework. An adapter translates the
framework's objects into calls of kvcore's public API, and kvcore never imports it.
"""
