"""Adapters between kvcore and the frameworks that embed it.

`for_torch`, `for_jax`, `for_cupy` and `for_numpy` give leased pages to a library as its own arrays,
`for_dlpack` to any other one; `for_transformers` is a cache for Hugging Face transformers.

One module per framework, each imported by name and only by those who use it: `import
kvcore_adapters` imports no framework. An adapter translates the framework's objects into calls of
kvcore's public API, and kvcore never imports it.
"""
